"""Runs as jobs of the cluster, through the job server of Ray's dashboard: they go on when this process ends.

submit() -> id -> follow(): the job's output as it comes, then its exit code
"""

import asyncio
import shlex
from collections.abc import Callable, Sequence

from ray.job_submission import JobStatus, JobSubmissionClient

from skirl.errors import WorkerError

__all__ = ["entry_point", "follow", "submit"]

INTERRUPTED = 130
STOP_SIGNAL = {"RAY_JOB_STOP_SIGNAL": "SIGINT"}
"""``ray job stop`` interrupts the run as Ctrl-C would, so that it gives its places back; Ray's default is SIGTERM."""


def entry_point(words: Sequence[str], directory: str) -> str:
    """The shell line that the job server runs, in the directory where it was asked for."""
    return f"cd {shlex.quote(directory)} && exec {shlex.join(words)}"


def submit(server: str, entrypoint: str, submission_id: str) -> None:
    """Starts a job.

    Raises:
        WorkerError: the server does not answer or refuses the job.
    """
    try:
        JobSubmissionClient(server).submit_job(
            entrypoint=entrypoint, submission_id=submission_id, runtime_env={"env_vars": STOP_SIGNAL}
        )
    except (ConnectionError, RuntimeError) as error:
        raise WorkerError(f"Ray's job server at {server} did not take the job: {error}") from error


def follow(server: str, submission_id: str, write: Callable[[str], object]) -> int:
    """Writes the job's output until it ends, and returns the exit code of the run.

    Raises:
        WorkerError: the server does not answer any more, or the job ended without a run.
    """

    async def read() -> None:
        async for piece in client.tail_job_logs(submission_id):
            write(piece)

    try:
        client = JobSubmissionClient(server)
        asyncio.run(read())
        info = client.get_job_info(submission_id)
    except (ConnectionError, RuntimeError) as error:
        raise WorkerError(f"job {submission_id} at {server} cannot be followed: {error}") from error
    if info.status == JobStatus.SUCCEEDED:
        return 0
    if info.status == JobStatus.STOPPED:
        return INTERRUPTED
    if info.status != JobStatus.FAILED:
        raise WorkerError(f"the output of job {submission_id} ended, but the job is {info.status}: {info.message}")
    if info.driver_exit_code is None:
        raise WorkerError(f"job {submission_id} failed before the run began: {info.message}")
    return info.driver_exit_code if info.driver_exit_code > 0 else 1
