"""The ranks of one role: each a Ray actor, called all at once and waited for with a deadline.

driver --ray.put(plan)--> rank 0..n-1 (process group among them) --reports--> driver
"""

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray

from skirl.config.schema import RayRuntimeConfig
from skirl.records import Plan, Ratio, Request, RewardText, Role, Rollout, Sampling, ScoreFailure, UpdateReport
from skirl.runtime import process_groups
from skirl.runtime.device import (
    collective_backend,
    free_cached_memory,
    gpu_uuid,
    memory_bytes,
    pick_device,
    reset_peak_memory,
)
from skirl.runtime.env import declare_rank, prepare_environment
from skirl.runtime.processes import resident_mb
from skirl.runtime.ray.calls import Identity, wait
from skirl.runtime.stacks import answer_stack_requests
from skirl.runtime.worker import Worker, WorkerSpec
from skirl.weights.endpoints import Place
from skirl.weights.manifest import Bucket, Manifest, TransportName
from skirl.weights.sender import WeightSender
from skirl.weights.transports import broadcast

__all__ = ["RankActor", "Ranks", "identify"]


def identify(name: str, gpu: str | None) -> Identity:
    """This process. ``gpu``: UUID of the GPU that it computes on itself."""
    context = ray.get_runtime_context()
    gpus = tuple(str(gpu) for gpu in context.get_accelerator_ids().get("GPU", ()))
    address = ray.util.get_node_ip_address()
    return Identity(name, os.getpid(), context.get_node_id(), address, gpus, gpu)


class RankActor:
    """One rank inside its Ray process."""

    def __init__(self, role: str, rank: int, num_ranks: int) -> None:
        answer_stack_requests()
        self._role, self._rank, self._num_ranks = role, rank, num_ranks
        self._store: Any = None
        self._worker: Worker | None = None
        self._gives_back = False
        self._sender: WeightSender | None = None

    def identify(self) -> Identity:
        """Which process this is."""
        return identify(f"{self._role} rank {self._rank} of {self._num_ranks}", gpu_uuid())

    def listen(self, timeout_s: float) -> tuple[str, int]:
        """Address and port at which this rank waits for the others."""
        address = ray.util.get_node_ip_address()
        self._store = process_groups.open_store(address, 0, timeout_s, serve=True)
        return address, self._store.port

    def listen_for_engines(self) -> tuple[str, int]:
        """Address and port at which this rank waits for the workers of engines, to broadcast weights to them."""
        address = ray.util.get_node_ip_address()
        return address, broadcast.listen(address)

    def build(self, spec: WorkerSpec, address: str, port: int, timeout_s: float) -> None:
        """Joins the other ranks, then loads the models."""
        from skirl.assemble_worker import build_worker

        prepare_environment()
        declare_rank(self._rank, self._num_ranks)
        backend = collective_backend(pick_device())
        process_groups.join(
            address=address,
            port=port,
            rank=self._rank,
            num_ranks=self._num_ranks,
            backend=backend,
            timeout_s=timeout_s,
            store=self._store,
        )
        self._store = None
        self._worker = build_worker(spec)
        self._gives_back = spec.config.trainer.offload is not None

    # ----------------------------------------------------------------------------------------------- sampling, training
    def generate(self, requests: Sequence[Request]) -> list[Rollout]:
        """One rollout a request."""
        return self._built().generate(requests)

    def update(self, plan: Plan, consumed_prompts: int, roles: Sequence[Role]) -> Mapping[Role, UpdateReport]:
        """This rank's share, of the roles that it holds; with the policy's, the memory of this process."""
        reports = self._built().update(plan, consumed_prompts, roles)
        resident, policy = resident_mb(), reports.get("policy")
        if resident is None or policy is None:
            return reports
        metrics = {**policy.metrics, "memory/rank_rss_mb": Ratio(resident, 1)}
        return {**reports, "policy": replace(policy, metrics=metrics)}

    def evaluate(self, plan: Plan) -> Mapping[str, Ratio]:
        """This rank's share."""
        return self._built().evaluate(plan)

    def logprobs(self, plan: Plan, role: Role, sampling: Sampling | None) -> Mapping[int, np.ndarray]:
        """This rank's share."""
        return self._built().logprobs(plan, role, [self._rank], sampling)

    def values(self, plan: Plan) -> Mapping[int, np.ndarray]:
        """This rank's share."""
        return self._built().values(plan)

    def reward_scores(self, name: str, texts: Sequence[RewardText]) -> list[float | ScoreFailure]:
        """By the reward model of this name in this process."""
        return self._built().reward_scores(name, texts)

    def commit(self, version: int) -> None:
        """Weights to the sampler in this process."""
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

    def export(self, directory: Path, role: Role) -> None:
        """Rank 0 writes, all gather."""
        self._built().export(directory, role, write=self._rank == 0)

    # -------------------------------------------------------------------------------------------------- weights, memory
    def place(self) -> Place:
        """Where this rank computes."""
        return Place(platform.node(), gpu_uuid())

    def open_weights(
        self, transport: TransportName, setup: bytes, version: int, *, whole: bool, bucket_bytes: int, checksum: bool
    ) -> Manifest:
        """Begins to send; every rank gathers, those that the transport asks for send."""
        if self._sender is None:
            self._sender = WeightSender(
                self._built().weights(),
                sends=self._rank == 0 or transport == "cuda_ipc",
                place=self.place(),
                bucket_bytes=bucket_bytes,
                checksum=checksum,
            )
        return self._sender.open(transport, setup, version=version, whole=whole)

    def pack_weights(self, index: int) -> Bucket:
        """One message; without a payload from a rank that only gathers."""
        assert self._sender is not None
        return self._sender.pack(index)

    def transmit_weights(self, index: int) -> None:
        """Broadcast transports: blocks until the engines have it."""
        assert self._sender is not None
        self._sender.transmit(index)

    def abort_weights(self) -> None:
        """Ends a commit that failed."""
        if self._sender is not None:
            self._sender.abort()

    def give_back(self) -> int:
        """Frees what training alone needs (``trainer.offload``), and cached memory; returns bytes moved."""
        moved = self._built().give_back() if self._gives_back else 0
        free_cached_memory()
        return moved

    def take_back(self) -> int:
        """Undoes ``give_back``; returns bytes."""
        return self._built().take_back() if self._gives_back else 0

    def memory(self) -> tuple[int, int]:
        """(bytes held, largest number of bytes held since the last call) on this rank's GPU."""
        held = memory_bytes()
        reset_peak_memory()
        return held

    def leave(self) -> None:
        """Leaves the process group."""
        process_groups.leave()

    def _built(self) -> Worker:
        assert self._worker is not None
        return self._worker


class Ranks:
    """The ranks of one role on their places.

    Args:
        options: Ray's options for each rank's actor, from the placement.
    """

    def __init__(self, role: str, options: Sequence[Mapping[str, Any]], config: RayRuntimeConfig) -> None:
        self.role, self._config = role, config
        actor = ray.remote(RankActor)
        self.actors: list[Any] = [
            actor.options(**one).remote(role, rank, len(options)) for rank, one in enumerate(options)
        ]
        self.identities: list[Identity] = []

    def identify(self) -> None:
        """Waits until every process is up, and learns which it is."""
        names = [f"{self.role} rank {rank} of {len(self.actors)}" for rank in range(len(self.actors))]
        self.identities = self._wait(
            [a.identify.remote() for a in self.actors], "starting processes", names, start=True
        )

    def begin_build(self, spec: WorkerSpec) -> Callable[[], None]:
        """Loads the models on all ranks; the result waits for them, so that engines may start meanwhile."""
        limit = self._config.call_timeout_s  # of every later collective too; a start that hangs, the driver ends
        address, port = self._wait(
            [self.actors[0].listen.remote(limit)], "finding a port", self.identities[:1], start=True
        )[0]
        references = [a.build.remote(spec, address, port, limit) for a in self.actors]
        return lambda: self._finish_build(references)

    def _finish_build(self, references: list[Any]) -> None:
        self._wait(references, "loading the models", self.identities, start=True)

    def call(self, what: str, of: Callable[[Any], Any], *, beside: "Sequence[Ranks]" = ()) -> list[Any]:
        """One call on every rank: ``of`` makes it, given an actor; results in order of rank.

        Args: beside: ranks of other roles that the call is begun on at the same time; their results follow.
        """
        together = [self, *beside]
        references = [of(actor) for ranks in together for actor in ranks.actors]
        return self._wait(references, what, [identity for ranks in together for identity in ranks.identities])

    def call_one(self, rank: int, what: str, of: Callable[[Any], Any]) -> Any:
        """One call on one rank."""
        return self.call_some(what, [rank], lambda _, actor: of(actor))[0]

    def call_some(self, what: str, ranks: Sequence[int], of: Callable[[int, Any], Any]) -> list[Any]:
        """One call on each of these ranks: ``of`` makes it, given rank and actor; results in order."""
        references = [of(rank, self.actors[rank]) for rank in ranks]
        return self._wait(references, what, [self.identities[rank] for rank in ranks])

    def kill(self) -> None:
        """Ends the processes; harmless to repeat."""
        actors, self.actors = self.actors, []
        for actor in actors:
            ray.kill(actor)

    def _wait(
        self, references: list[Any], what: str, names: Sequence[Identity | str], *, start: bool = False
    ) -> list[Any]:
        limit = self._config.start_timeout_s if start else self._config.call_timeout_s
        setting = "runtime.start_timeout_s" if start else "runtime.call_timeout_s"
        return wait(references, what, names, limit, setting=setting)
