"""A run on a Ray cluster: places reserved, ranks and engines brought up, and what the loop calls on them.

recipe + cluster -> placement -> reservation -> ranks (policy, critic, reference, reward), engines -> first commit
Refuses what the cluster cannot hold before anything starts; gives everything back at the end, whatever the end was.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray

from skirl.config.schema import PlacedRole, PolicyEngineConfig, RayRuntimeConfig, VLLMEngineConfig
from skirl.errors import ConfigError, WeightSyncError
from skirl.protocols import RolloutEngine
from skirl.records import (
    CommitReport,
    Plan,
    Ratio,
    Request,
    RewardText,
    Role,
    Rollout,
    Sampling,
    ScoreFailure,
    UpdateReport,
    sum_ratios,
)
from skirl.runtime.env import prepare_environment
from skirl.runtime.phases import Phases
from skirl.runtime.placement import RUN_PLANS, Placement, Process
from skirl.runtime.ray.commits import Commits
from skirl.runtime.ray.engines import Engines, RayEngine
from skirl.runtime.ray.memory import RayPhaseActions
from skirl.runtime.ray.placement import Reservation, gpu_ids_of, reserve
from skirl.runtime.ray.ranks import Ranks
from skirl.runtime.ray.rewards import RewardRanks
from skirl.runtime.stopping import same_sigterm
from skirl.runtime.threads import in_thread
from skirl.runtime.worker import WorkerSpec
from skirl.runtime.workers import (
    EngineSetup,
    ThreadedEngine,
    commit_metrics,
    merge_sequences,
    merge_updates,
)

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
        self._ranks: dict[PlacedRole, Ranks] = {}
        self._rewards: RewardRanks | None = None
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
        from_checkpoint = engine is not None and self._spec.objective is None  # engines load their weights themselves
        planned: tuple[PlacedRole, ...] = () if from_checkpoint else RUN_PLANS
        wanted: tuple[PlacedRole, ...] = (*planned, "reward")
        self._ranks = {role: self._make_ranks(role) for role in wanted if self._placement.of(role)}
        for ranks in self._ranks.values():
            ranks.identify()
        if "reward" in self._ranks:
            self._rewards = RewardRanks(self._ranks["reward"])
        if engine is None:
            self._build()()
            return
        self._engines = self._make_engines(engine, trained=not from_checkpoint)
        finish_engines = self._engines.begin_start()
        if from_checkpoint:
            self._build()()
            finish_engines()
            return
        if self._shared():
            finish_engines()  # they measure free memory, and then make room for the models
            self._engines.call("putting the engines to sleep", lambda actor: actor.sleep.remote(2))
        self._build()()
        if not self._shared():
            finish_engines()
        self._commits = Commits(self._policy(), self._spec.config.rollout.commit)
        self._commits.connect(self._engines.all)

    def _shared(self) -> bool:
        """Engines and trainer share GPUs, so that memory must move between them."""
        return self._placement.device == "gpu" and self._placement.shares("policy", "rollout")

    def _make_ranks(self, role: PlacedRole) -> Ranks:
        assert self._reservation is not None
        processes = self._placement.of(role)
        return Ranks(role, [self._reservation.options(process) for process in processes], self._config)

    def _build(self) -> Callable[[], None]:
        """Begins to load the models of all ranks; the result waits for them."""
        waiting = [ranks.begin_build(self._spec_of(host)) for host, ranks in self._ranks.items()]

        def finish() -> None:
            for wait_for in waiting:
                wait_for()

        return finish

    def _spec_of(self, host: PlacedRole) -> WorkerSpec:
        """What the processes of this name hold."""
        if host == "reward":
            return replace(self._spec, holds=(), samples=False)
        inside = self._placement.of(host)[0].holds
        roles: tuple[Role, ...] = ("policy", "reference", "critic")
        holds = tuple(role for role in roles if role in inside)
        samples = self._spec.samples and host == "policy" and self._engines is None
        return replace(self._spec, holds=holds, samples=samples, reward_models=())

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
            RayPhaseActions(engines, self._policy, self._send, weights_lost=lambda: phases.weights_lost()),
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
            ThreadedEngine(lambda requests, rank=rank: self._generate(rank, requests), sampler.batch_size, remote=True)
            for rank in range(self.num_ranks)
        ]

    def _generate(self, rank: int, requests: Sequence[Request]) -> list[Rollout]:
        return self._policy().call_one(rank, "sampling", lambda actor: actor.generate.remote(requests))

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
        ranks = self._ranks_of(role, scored=plan)
        shared = ray.put(plan)
        shares = ranks.call(f"{role} log-probs", lambda actor: actor.logprobs.remote(shared, role, sampling))
        return merge_sequences(plan, shares)

    def values(self, plan: Plan) -> list[np.ndarray]:
        """The critic's, per sequence [T] float32."""
        ranks, shared = self._ranks_of("critic", scored=plan), ray.put(plan)
        return merge_sequences(plan, ranks.call("the critic's values", lambda actor: actor.values.remote(shared)))

    def update(self, plan: Plan, consumed_prompts: int, roles: Sequence[Role] = ("policy",)) -> UpdateReport:
        """Runs the plan for each role on all of its ranks; roles in different processes at the same time."""
        first, *others = list(dict.fromkeys(self._ranks_of(role) for role in roles))
        shared = ray.put(plan)
        shares = first.call(
            "the update", lambda actor: actor.update.remote(shared, consumed_prompts, tuple(roles)), beside=others
        )
        return merge_updates(shares, 0 if "policy" in roles else self.policy_version())

    def evaluate(self, plan: Plan) -> Mapping[str, Ratio]:
        """The objective over a plan, without a gradient."""
        ranks, shared = self._ranks_of("policy", scored=plan), ray.put(plan)
        return sum_ratios(ranks.call("the held-out loss", lambda actor: actor.evaluate.remote(shared)))

    def reward_scores(self, name: str, texts: Sequence[RewardText]) -> list[float | ScoreFailure]:
        """Raw scores by the reward ranks; from any thread, while engines sample."""
        assert self._rewards is not None, "this run has no reward model"
        return self._rewards.scores(name, texts)

    def _ranks_of(self, role: Role, *, scored: Plan | None = None) -> Ranks:
        """The ranks that hold a role's model, with room on their GPUs: engines that share them sleep.

        Args: scored: a plan that is only scored; a small one fits beside awake engines.
        """
        host = self._placement.host_of(role) or "policy"  # a reference without a place is the policy without adapters
        if host not in self._ranks:
            raise ConfigError(f"this run has no {role}")
        if host == "policy" and (scored is None or sum(s.num_tokens for s in scored.sequences) > SMALL_SCORING_TOKENS):
            self._enter_train()
        return self._ranks[host]

    def describe(self) -> str:
        """What the ranks of each role hold, where everything runs."""
        every = list(self._ranks.values())
        lines = [ranks.call_one(0, "the description", lambda actor: actor.describe.remote()) for ranks in every]
        lines += [str(identity) for ranks in every for identity in ranks.identities]
        lines += [str(engine.identity) for engine in self._engines.all] if self._engines is not None else []
        return "\n".join(lines)

    def policy_version(self) -> int:
        """Updates done so far."""
        return self._policy().call_one(0, "the policy version", lambda actor: actor.policy_version.remote())

    def save(self, directory: Path) -> None:
        """Trainer state of all ranks."""
        self._call_trained("saving the checkpoint", lambda actor: actor.save.remote(directory))

    def load(self, directory: Path) -> None:
        """What ``save`` wrote; the engines get the weights too."""
        self._call_trained("loading the checkpoint", lambda actor: actor.load.remote(directory))
        self.commit(self.policy_version())

    def _call_trained(self, what: str, of: Callable[[Any], Any]) -> None:
        """One call on all ranks of policy and critic. Optimizer state that was given back is taken again before."""
        if self._spec.config.trainer.offload is not None:
            self._enter_train()
        others = [self._ranks["critic"]] if "critic" in self._ranks else []
        self._policy().call(what, of, beside=others)

    def export(self, directory: Path, role: Role = "policy") -> None:
        """A Hugging Face model directory. An average that was given back with the optimizer is taken again before."""
        trainer = self._spec.config.trainer
        if role == "policy" and trainer.ema is not None and trainer.offload is not None:
            self._enter_train()
        ranks = self._ranks[self._placement.host_of(role) or "policy"]
        ranks.call(f"exporting the {role}", lambda actor: actor.export.remote(directory, role))

    def _enter_train(self) -> None:
        if self._phases is not None:
            self._phases.enter("train")

    def _policy(self) -> Ranks:
        return self._ranks["policy"]

    # ---------------------------------------------------------------------------------------------------------- commits
    def commit(self, version: int) -> Mapping[str, Ratio]:
        """Brings the weights to every engine, or to the samplers in the ranks."""
        if self._engines is None or self._phases is None:
            self._policy().call("the weight commit", lambda actor: actor.commit.remote(version))
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
            for ranks in self._ranks.values():
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
        with same_sigterm():
            ray.init(
                address="local",  # whatever other clusters this machine has
                include_dashboard=False,
                configure_logging=False,
                log_to_driver=False,
                object_store_memory=512 << 20,
            )
        return True
    try:
        with same_sigterm():
            ray.init(address=config.address, configure_logging=False)
    except ConnectionError as error:
        raise ConfigError(
            f"no Ray cluster answers at runtime.address {config.address!r}: {error}; start one with `skirl cluster up`"
            ", or leave the address out to start one here"
        ) from error
    return True
