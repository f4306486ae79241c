"""A run on a Ray cluster: places reserved, ranks and engines brought up, and what the loop calls on them.

recipe + cluster -> placement -> reservation -> ranks (policy, reference), engines -> first weight commit -> Workers
Refuses what the cluster cannot hold before anything starts; gives everything back at the end, whatever the end was.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import ray

from skirl.config.schema import PlacedRole, PolicyEngineConfig, RayRuntimeConfig, VLLMEngineConfig
from skirl.errors import ConfigError, WeightSyncError
from skirl.protocols import RolloutEngine
from skirl.records import CommitReport, Plan, Ratio, Request, Role, Rollout, Sampling, UpdateReport
from skirl.runtime.env import prepare_environment
from skirl.runtime.phases import Phases
from skirl.runtime.placement import Placement, Process
from skirl.runtime.ray.calls import in_thread
from skirl.runtime.ray.commits import Commits
from skirl.runtime.ray.engines import Engines, RayEngine
from skirl.runtime.ray.memory import RayPhaseActions
from skirl.runtime.ray.placement import Reservation, gpu_ids_of, reserve
from skirl.runtime.ray.ranks import Ranks
from skirl.runtime.worker import WorkerSpec
from skirl.runtime.workers import EngineSetup, ThreadedEngine, commit_metrics, merge_logprobs, merge_reports

__all__ = ["RayWorkers", "connect"]

log = logging.getLogger(__name__)

SMALL_SCORING_TOKENS = 4096
"""A scoring pass of no more than this runs beside awake engines: its activations fit into the margin."""


class RayWorkers:
    """All processes of a run. Implements ``runtime.workers.Workers``.

    Args:
        placement: who computes where; planned for this cluster.
        engine: what vLLM engines are made from; None where the policy samples itself.
        own_cluster: this run started Ray, or connected to it, and ends that with itself.
    """

    def __init__(
        self, spec: WorkerSpec, placement: Placement, *, engine: EngineSetup | None, own_cluster: bool
    ) -> None:
        runtime = spec.config.runtime
        assert isinstance(runtime, RayRuntimeConfig)
        self._config, self._spec, self._placement = runtime, spec, placement
        self._own_cluster = own_cluster
        self._reservation: Reservation | None = None
        self._policy: Ranks | None = None
        self._reference: Ranks | None = None
        self._engines: Engines | None = None
        self._commits: Commits | None = None
        self._phases: Phases | None = None
        try:
            self._reservation = reserve(placement, runtime.start_timeout_s, name=str(spec.config.run.dir))
            self._start(engine)
        except BaseException:  # fence: everything reserved so far is given back, then the error goes on
            self.shutdown()
            raise

    # ------------------------------------------------------------------------------------------------------------ start
    def _start(self, engine: EngineSetup | None) -> None:
        if engine is not None and self._spec.objective is None:  # evaluation: engines load the checkpoint themselves
            self._engines = self._make_engines(engine, trained=False)
            self._engines.begin_start()()
            return
        together = self._placement.shares("policy", "reference")
        self._policy = self._ranks("policy")
        if self._spec.with_reference and not together:
            self._reference = self._ranks("reference")
        for ranks in self._all_ranks():
            ranks.identify()
        if engine is not None:
            self._engines = self._make_engines(engine, trained=True)
            finish_engines = self._engines.begin_start()
            if self._shared():
                finish_engines()  # they measure free memory, and then make room for the models
                self._engines.call("putting the engines to sleep", lambda actor: actor.sleep.remote(2))
            self._build(together)()
            if not self._shared():
                finish_engines()
            self._commits = Commits(self._policy, self._spec.config.rollout.commit)
            self._commits.connect(self._engines.all)
        else:
            self._build(together)()

    def _shared(self) -> bool:
        """Engines and trainer share GPUs, so that memory must move between them."""
        return self._placement.device == "gpu" and self._placement.shares("policy", "rollout")

    def _ranks(self, role: PlacedRole) -> Ranks:
        assert self._reservation is not None
        processes = self._placement.of(role)
        return Ranks(role, [self._reservation.options(process) for process in processes], self._config)

    def _all_ranks(self) -> list[Ranks]:
        return [ranks for ranks in (self._policy, self._reference) if ranks is not None]

    def _build(self, together: bool) -> Callable[[], None]:
        assert self._policy is not None
        holds: tuple[Role, ...] = ("policy", "reference") if together else ("policy",)
        waiting = [self._policy.begin_build(replace(self._spec, holds=holds, samples=self._engines is None))]
        if self._reference is not None:
            waiting.append(self._reference.begin_build(replace(self._spec, holds=("reference",), samples=False)))

        def finish() -> None:
            for wait_for in waiting:
                wait_for()

        return finish

    def _make_engines(self, setup: EngineSetup, *, trained: bool) -> Engines:
        assert self._reservation is not None
        config = self._spec.config.rollout.engine
        assert isinstance(config, VLLMEngineConfig)
        made = [self._make_engine(process, config) for process in self._placement.of("rollout")]
        spec = replace(setup.spec, enable_sleep=trained and self._shared())
        engines = Engines(spec, setup.expected, made, config, send_weights=self._send_whole)
        if not trained:
            return engines
        self._phases = phases = Phases(
            RayPhaseActions(engines, self._trained, self._send, weights_lost=lambda: phases.weights_lost()),
            shared=self._shared(),
            sleep_level=setup.sleep_level,
        )
        for engine in made:
            engine.before_generate = lambda: phases.enter("generate")
        return engines

    def _make_engine(self, process: Process, config: VLLMEngineConfig) -> RayEngine:
        assert self._reservation is not None
        gpu_ids = gpu_ids_of(self._reservation, process) if len(process.bundles) > 1 else ()
        return RayEngine(process.index, self._reservation.options(process), gpu_ids, config)

    # --------------------------------------------------------------------------------------------------------- sampling
    @property
    def engines(self) -> Sequence[RolloutEngine]:
        """vLLM's, or one a rank where the policy samples itself."""
        if self._engines is not None:
            return self._engines.all
        asked = self._spec.config.rollout.engine
        sampler = asked if isinstance(asked, PolicyEngineConfig) else PolicyEngineConfig()
        return [
            ThreadedEngine(lambda requests, rank=rank: self._generate(rank, requests), sampler.batch_size)
            for rank in range(self.num_ranks)
        ]

    def _generate(self, rank: int, requests: Sequence[Request]) -> list[Rollout]:
        return self._trained().call_one(rank, "sampling", lambda actor: actor.generate.remote(requests))

    def invalidate_caches(self) -> None:
        """Every engine drops its prefix, encoder and multimodal caches."""
        if self._engines is not None:
            self._engines.call("dropping the caches", lambda actor: actor.invalidate_caches.remote())

    # --------------------------------------------------------------------------------------------------------- training
    @property
    def num_ranks(self) -> int:
        """Ranks a plan is made for."""
        return len(self._placement.of("policy"))

    def logprobs(self, plan: Plan, role: Role, sampling: Sampling | None = None) -> list[np.ndarray]:
        """Per sequence [T] float32."""
        if sum(s.num_tokens for s in plan.sequences) > SMALL_SCORING_TOKENS:
            self._enter_train()
        ranks = self._reference if role == "reference" and self._reference is not None else self._trained()
        if len(ranks.actors) != plan.num_ranks:
            raise ConfigError(
                f"runtime.placement: the reference has {len(ranks.actors)} GPUs and the policy {plan.num_ranks}; "
                "give both groups the same number"
            )
        shared = ray.put(plan)
        shares = ranks.call(f"{role} log-probs", lambda actor: actor.logprobs.remote(shared, role, sampling))
        return merge_logprobs(plan, shares)

    def update(self, plan: Plan, consumed_prompts: int) -> UpdateReport:
        """Runs the plan on all ranks."""
        self._enter_train()
        shared = ray.put(plan)
        reports = self._trained().call("the update", lambda actor: actor.update.remote(shared, consumed_prompts))
        return merge_reports(reports)

    def describe(self) -> str:
        """What each rank holds, where everything runs."""
        lines = []
        if self._policy is not None:
            lines.append(self._policy.call_one(0, "the description", lambda actor: actor.describe.remote()))
        lines += [str(identity) for ranks in self._all_ranks() for identity in ranks.identities]
        lines += [str(engine.identity) for engine in self._engines.all] if self._engines is not None else []
        return "\n".join(lines)

    def policy_version(self) -> int:
        """Updates done so far."""
        return self._trained().call_one(0, "the policy version", lambda actor: actor.policy_version.remote())

    def save(self, directory: Path) -> None:
        """Trainer state of all ranks."""
        self._trainer_is_whole()
        self._trained().call("saving the checkpoint", lambda actor: actor.save.remote(directory))

    def load(self, directory: Path) -> None:
        """What ``save`` wrote; the engines get the weights too."""
        self._trainer_is_whole()
        self._trained().call("loading the checkpoint", lambda actor: actor.load.remote(directory))
        self.commit(self.policy_version())

    def export(self, directory: Path) -> None:
        """A Hugging Face model directory."""
        self._trained().call("exporting the model", lambda actor: actor.export.remote(directory))

    def _trainer_is_whole(self) -> None:
        """Optimizer state that was given back is taken again."""
        if self._spec.config.trainer.offload is not None:
            self._enter_train()

    def _enter_train(self) -> None:
        if self._phases is not None:
            self._phases.enter("train")

    def _trained(self) -> Ranks:
        assert self._policy is not None
        return self._policy

    # ---------------------------------------------------------------------------------------------------------- commits
    def commit(self, version: int) -> Mapping[str, Ratio]:
        """Brings the weights to every engine, or to the samplers in the ranks."""
        if self._engines is None or self._phases is None:
            self._trained().call("the weight commit", lambda actor: actor.commit.remote(version))
            return commit_metrics(CommitReport(version))
        report = self._phases.commit(version)
        self._phases.enter("generate")
        numbers = {"engine/restarts": self._engines.restarts, "engine/reissued": self._engines.reissued}
        return {
            **commit_metrics(report),
            **self._phases.take_report(),
            **{name: Ratio(float(number), 1) for name, number in numbers.items()},
        }

    def send_all_weights(self) -> None:
        """Sends the trainer's weights again, frozen ones too."""
        if self._phases is not None:
            self._phases.weights_lost()
            self._phases.commit(self.policy_version())
            self._phases.enter("generate")

    def _send(self, version: int, whole: bool) -> CommitReport:
        """All engines or an error; one that died is replaced, and then all get everything."""
        assert self._engines is not None
        assert self._commits is not None
        while True:
            try:
                return asyncio.run(self._commits.send(self._engines.all, version=version, whole=whole))
            except WeightSyncError as error:
                if not self._engines.replace_dead():
                    raise
                log.warning("weight commit %d is made again: %s", version, error)
                whole = True

    async def _send_whole(self, engine: RayEngine) -> None:
        """The current weights to an engine that was replaced, while the others sample."""
        if self._commits is None:  # it loaded the checkpoint
            return
        version = await in_thread(self.policy_version)
        await self._commits.send([engine], version=version, whole=True)

    # -------------------------------------------------------------------------------------------------------------- end
    def shutdown(self) -> None:
        """Ends all processes, gives their places back, and ends the cluster if it was started here."""
        if not ray.is_initialized():
            return
        with ExitStack() as ending:  # from the last to the first; an error or Ctrl-C in one does not keep the others
            if self._own_cluster:
                ending.callback(ray.shutdown)
            if self._reservation is not None:
                ending.callback(self._reservation.release)
            for ranks in self._all_ranks():
                ending.callback(ranks.kill)
            if self._commits is not None:
                ending.callback(self._commits.close)
            if self._engines is not None:
                ending.callback(self._engines.kill)


def connect(config: RayRuntimeConfig) -> bool:
    """Joins the cluster at ``runtime.address`` or starts one on this machine; False if this process had done so."""
    if ray.is_initialized():
        return False
    prepare_environment()
    if config.address is None:
        ray.init(
            address="local",  # whatever other clusters this machine has
            include_dashboard=False,
            configure_logging=False,
            log_to_driver=False,
            object_store_memory=512 << 20,
        )
        return True
    try:
        ray.init(address=config.address, configure_logging=False)
    except ConnectionError as error:
        raise ConfigError(
            f"no Ray cluster answers at runtime.address {config.address!r}: {error}; start one with `skirl cluster up`"
            ", or leave the address out to start one here"
        ) from error
    return True
