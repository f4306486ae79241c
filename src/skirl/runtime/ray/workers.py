"""Each training rank is a Ray actor; the driver calls all of them at once and waits with a deadline.

driver --ray.put(plan)--> rank 0..n-1 (process group among them) --reports--> driver
"""

import logging
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from skirl.config.schema import RayRuntimeConfig
from skirl.errors import ConfigError, SkirlError, WorkerError
from skirl.records import Plan, Request, Role, Rollout, UpdateReport
from skirl.runtime import process_groups
from skirl.runtime.device import collective_backend, has_gpu, pick_device
from skirl.runtime.env import declare_rank, prepare_environment
from skirl.runtime.worker import Worker, WorkerSpec
from skirl.runtime.workers import ThreadedEngine, merge_logprobs, merge_reports

__all__ = ["RayWorkers"]

log = logging.getLogger(__name__)


class RankActor:
    """One rank inside its Ray process."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._rank, self._num_ranks = rank, num_ranks
        self._worker: Worker | None = None

    def endpoint(self) -> tuple[str, int]:
        """Address of this node and a free port on it, for the rendezvous of the ranks."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def build(self, spec: WorkerSpec, address: str, port: int, timeout_s: float) -> None:
        """Joins the other ranks, then loads the models."""
        from skirl.assemble_worker import build_worker

        prepare_environment()
        declare_rank(self._rank, self._num_ranks)
        backend = collective_backend(pick_device())
        process_groups.join(
            address=address, port=port, rank=self._rank, num_ranks=self._num_ranks, backend=backend, timeout_s=timeout_s
        )
        self._worker = build_worker(spec)

    def generate(self, requests: Sequence[Request]) -> list[Rollout]:
        """One rollout a request."""
        return self._built().generate(requests)

    def update(self, plan: Plan, consumed_prompts: int) -> UpdateReport:
        """This rank's share."""
        return self._built().update(plan, consumed_prompts)

    def logprobs(self, plan: Plan, role: Role) -> Mapping[int, np.ndarray]:
        """This rank's share."""
        return self._built().logprobs(plan, role, [self._rank])

    def commit(self, version: int) -> None:
        """Weights to the sampler."""
        self._built().commit(version)

    def policy_version(self) -> int:
        """Updates done so far."""
        return self._built().policy_version()

    def describe(self) -> str:
        """What this rank holds."""
        return self._built().description

    def save(self, directory: Path) -> None:
        """Trainer state."""
        self._built().save(directory)

    def load(self, directory: Path) -> None:
        """What ``save`` wrote."""
        self._built().load(directory)

    def export(self, directory: Path) -> None:
        """Rank 0 writes, all gather."""
        self._built().export(directory, write=self._rank == 0)

    def leave(self) -> None:
        """Leaves the process group."""
        process_groups.leave()

    def _built(self) -> Worker:
        assert self._worker is not None
        return self._worker


class RayWorkers:
    """All ranks of a run on a Ray cluster. Refuses what the cluster cannot hold before anything starts."""

    def __init__(self, spec: WorkerSpec, config: RayRuntimeConfig, *, num_ranks: int, batch_size: int) -> None:
        self._config, self._num_ranks = config, num_ranks
        self._own_cluster = not ray.is_initialized()
        self._group: PlacementGroup | None = None
        self._actors: list[Any] = []
        _connect(config)
        try:
            self._start(spec)
        except BaseException:  # fence: everything reserved so far is given back, then the error goes on
            self.shutdown()
            raise
        self._engines = [
            ThreadedEngine(lambda requests, rank=rank: self._generate(rank, requests), batch_size)
            for rank in range(num_ranks)
        ]

    def _start(self, spec: WorkerSpec) -> None:
        gpus = float(has_gpu()) if self._config.gpus_per_rank is None else self._config.gpus_per_rank
        bundle = {"CPU": self._config.cpus_per_rank} | ({"GPU": gpus} if gpus else {})
        _check_supply(bundle, self._num_ranks)
        self._group = placement_group([bundle] * self._num_ranks, strategy="PACK")
        deadline = self._config.start_timeout_s
        self._wait([self._group.ready()], "reserving the ranks' places", deadline)
        actor = ray.remote(RankActor)
        self._actors = [
            actor.options(
                num_cpus=self._config.cpus_per_rank,
                num_gpus=gpus,
                name=None,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank),
            ).remote(rank, self._num_ranks)
            for rank in range(self._num_ranks)
        ]
        address, port = self._wait([self._actors[0].endpoint.remote()], "starting rank 0", deadline)[0]
        self._wait(
            [a.build.remote(spec, address, port, deadline) for a in self._actors], "loading the models", deadline
        )

    @property
    def engines(self) -> list[ThreadedEngine]:
        """One engine a rank."""
        return self._engines

    @property
    def num_ranks(self) -> int:
        """Ranks a plan is made for."""
        return self._num_ranks

    def _generate(self, rank: int, requests: Sequence[Request]) -> list[Rollout]:
        reference = self._actors[rank].generate.remote(requests)
        return self._wait([reference], f"sampling on rank {rank}", first_rank=rank)[0]

    def logprobs(self, plan: Plan, role: Role) -> list[np.ndarray]:
        """Per sequence [T] float32."""
        shared = ray.put(plan)
        shares = self._wait([a.logprobs.remote(shared, role) for a in self._actors], f"{role} log-probs")
        return merge_logprobs(plan, shares)

    def update(self, plan: Plan, consumed_prompts: int) -> UpdateReport:
        """Runs the plan on all ranks."""
        shared = ray.put(plan)
        return merge_reports(
            self._wait([a.update.remote(shared, consumed_prompts) for a in self._actors], "the update")
        )

    def commit(self, version: int) -> None:
        """Brings the weights to every sampler."""
        self._wait([a.commit.remote(version) for a in self._actors], "the weight commit")

    def describe(self) -> str:
        """What each rank holds: the trainable parameters by role."""
        return self._wait([self._actors[0].describe.remote()], "the description")[0]

    def policy_version(self) -> int:
        """Updates done so far."""
        return self._wait([self._actors[0].policy_version.remote()], "the policy version")[0]

    def save(self, directory: Path) -> None:
        """Trainer state of all ranks."""
        self._wait([a.save.remote(directory) for a in self._actors], "saving the checkpoint")

    def load(self, directory: Path) -> None:
        """What ``save`` wrote."""
        self._wait([a.load.remote(directory) for a in self._actors], "loading the checkpoint")

    def export(self, directory: Path) -> None:
        """A Hugging Face model directory."""
        self._wait([a.export.remote(directory) for a in self._actors], "exporting the model")

    def shutdown(self) -> None:
        """Ends the ranks, gives their places back, and ends the cluster if it was started here."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
        if self._group is not None and ray.is_initialized():
            remove_placement_group(self._group)
            self._group = None
        if self._own_cluster and ray.is_initialized():
            ray.shutdown()

    def _wait(self, references: list[Any], what: str, timeout_s: float | None = None, first_rank: int = 0) -> list[Any]:
        """Results of one call on several ranks, in order.

        The first failure ends the wait: its peers may hang in a collective for ever. Peers get two seconds to fail too,
        and the most telling error is raised: a process that died, then skirl's own, then any other.
        """
        limit = self._config.call_timeout_s if timeout_s is None else timeout_s
        end = time.monotonic() + limit
        pending, errors = list(references), []
        while pending:
            ready, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, end - time.monotonic()))
            if not ready:
                break
            errors += [e for r in ready if (e := self._error(r, first_rank + references.index(r), what)) is not None]
            if errors and len(references) > 1:
                end = min(end, time.monotonic() + 2.0)
        if errors:
            raise min(errors, key=_telling)
        if pending:
            late = [first_rank + references.index(r) for r in pending]
            raise WorkerError(
                f"{what}: rank {', '.join(map(str, late))} of {self._num_ranks} did not answer within {limit:.0f} s "
                "(runtime.call_timeout_s, runtime.start_timeout_s); it is overloaded, or waits for something outside"
            )
        return ray.get(references)

    def _error(self, reference: Any, rank: int, what: str) -> SkirlError | None:
        try:
            ray.get(reference)
        except RayTaskError as error:
            if isinstance(error.cause, SkirlError):
                return error.cause
            return WorkerError(f"{what}: rank {rank} of {self._num_ranks} failed:\n{error}")
        except RayActorError as error:
            return DiedError(
                f"{what}: the process of rank {rank} of {self._num_ranks} died: {str(error).strip()}; its log is in "
                "Ray's session directory, and dmesg shows whether the machine ran out of memory"
            )
        return None


class DiedError(WorkerError):
    """A rank's process is gone."""


def _telling(error: SkirlError) -> int:
    if isinstance(error, DiedError):
        return 0
    return 2 if isinstance(error, WorkerError) else 1


def _connect(config: RayRuntimeConfig) -> None:
    if ray.is_initialized():
        return
    prepare_environment()
    if config.address is None:
        ray.init(include_dashboard=False, configure_logging=False, log_to_driver=False, object_store_memory=512 << 20)
        return
    try:
        ray.init(address=config.address, configure_logging=False)
    except ConnectionError as error:
        raise ConfigError(
            f"no Ray cluster answers at runtime.address {config.address!r}: {error}; start one with `ray start --head`"
            ", or leave the address out to start one here"
        ) from error


def _check_supply(bundle: Mapping[str, float], num_ranks: int) -> None:
    supply = ray.cluster_resources()
    for resource, each in bundle.items():
        have = supply.get(resource, 0.0)
        if each * num_ranks > have:
            raise ConfigError(
                f"trainer.ranks = {num_ranks} needs {each * num_ranks:g} {resource} ({each:g} a rank), but the Ray "
                f"cluster has {have:g}; lower trainer.ranks or runtime.{resource.lower()}s_per_rank, or add nodes"
            )
