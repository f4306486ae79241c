"""Calls on several Ray processes at once, with one deadline, one error and an answer to "who is stuck, and where".

references of one call each -> results in order, or the most telling error
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import (
    GetTimeoutError,
    NodeDiedError,
    ObjectLostError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from skirl.errors import EngineDied, SkirlError, WorkerError
from skirl.runtime.stacks import ask_for_stacks

__all__ = ["DiedError", "Identity", "as_skirl_error", "most_telling", "wait"]

PEERS_MAY_FAIL_FOR_S = 2.0
STACKS_WITHIN_S = 20.0
"""Of all that are asked."""

GONE = (RayActorError, WorkerCrashedError, NodeDiedError, ObjectLostError)
"""The process, or the machine that held its answer."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Which process this is, for messages and for placement.

    Attributes:
        name: "rank 3 of 8", "engine 0". pid, node_id, address: where it runs.
        gpu_ids: GPUs that Ray gave to it, as indices on its node. gpu: UUID of the first one, None on the CPU.
    """

    name: str
    pid: int
    node_id: str
    address: str
    gpu_ids: tuple[str, ...]
    gpu: str | None

    def __str__(self) -> str:
        """ "rank 3 of 8 (process 4711 on 10.0.0.2, GPU 3)"."""
        gpus = f", GPU {', '.join(self.gpu_ids)}" if self.gpu_ids else ""
        return f"{self.name} (process {self.pid} on {self.address}{gpus})"


class DiedError(WorkerError):
    """A process is gone."""


def wait(
    references: Sequence[Any], what: str, names: Sequence[Identity | str], timeout_s: float, *, setting: str
) -> list[Any]:
    """Results of one call on several processes, in order.

    The first failure ends the wait: its peers may hang in a collective for ever. Peers get two seconds to fail too,
    and the most telling error is raised: a process that died, then skirl's own, then any other.

    Args:
        what: the call, for messages: "the update".
        names: who was called, in the order of the references.
        setting: the recipe's path of the deadline, for the message.

    Raises:
        WorkerError: a process died, failed, or did not answer in time; the message then holds its stack.
    """
    end = time.monotonic() + timeout_s
    pending, errors = list(references), []
    results: dict[Any, Any] = {}
    while pending:
        ready, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, end - time.monotonic()))
        if not ready:
            break
        for reference in ready:
            try:
                results[reference] = ray.get(reference)
            except RayError as error:
                errors.append(as_skirl_error(error, names[references.index(reference)], what))
        if errors and len(references) > 1:
            end = min(end, time.monotonic() + PEERS_MAY_FAIL_FOR_S)
    if errors:
        raise most_telling(errors)
    if pending:
        late = [names[references.index(r)] for r in pending]
        raise WorkerError(
            f"{what}: {', '.join(map(str, late))} did not answer within {timeout_s:g} s ({setting}).\n{stacks_of(late)}"
        )
    return [results[reference] for reference in references]


def as_skirl_error(error: RayError, name: Identity | str, what: str) -> SkirlError:
    """Ray's error as ours: skirl's own errors as they were raised, everything else with who and what."""
    if isinstance(error, RayTaskError):
        if isinstance(error.cause, SkirlError):
            return error.cause
        return WorkerError(f"{what}: {name} failed:\n{error}")
    if isinstance(error, GONE):
        return DiedError(
            f"{what}: {name} died: {str(error).strip()}; its log is in Ray's session directory, and dmesg shows "
            "whether the machine ran out of memory"
        )
    return WorkerError(f"{what}: {name}: {error}")


def most_telling(errors: Sequence[SkirlError]) -> SkirlError:
    """A process that died, then skirl's own errors, then any other: one process's end makes its peers fail."""
    return min(errors, key=_telling)


def _telling(error: SkirlError) -> int:
    if isinstance(error, DiedError | EngineDied):
        return 0
    return 2 if isinstance(error, WorkerError) else 1


def stacks_of(late: Sequence[Identity | str]) -> str:
    """Where these processes are, asked on their nodes."""
    known = [name for name in late if isinstance(name, Identity)]
    if not known:
        return "It has not started: Ray found no room for it, or its node is overloaded (ray status shows both)."
    asked = {
        identity: ray.remote(ask_for_stacks)
        .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(identity.node_id, soft=False))
        .remote([identity.pid])
        for identity in known
    }
    parts, end = [], time.monotonic() + STACKS_WITHIN_S
    for identity, reference in asked.items():
        try:
            stacks = ray.get(reference, timeout=max(0.1, end - time.monotonic()))  # 0 asks once, and is never in time
            parts.append(f"{identity.name} is at:\n{stacks}")
        except (GetTimeoutError, RayError) as error:
            parts.append(f"{identity.name}: its node {identity.address} does not answer either ({error})")
    return "\n".join(parts)
