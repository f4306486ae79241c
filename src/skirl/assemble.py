"""The only place that turns a Config into objects; heavy backends are imported here, when they are used.

recipe -> model files, rows, prompts -> workers (local or Ray) -> parts -> loop -> tables
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch

from skirl.assemble_engines import engine_setup, probed
from skirl.assemble_worker import build_worker
from skirl.cli.console import output, setup_logging, terminal
from skirl.collect import StepCollector
from skirl.config.check import Command
from skirl.config.formula import method_record
from skirl.config.load import Loaded
from skirl.config.method import MethodConfig
from skirl.config.schema import (
    Config,
    DeepSpeedBackendConfig,
    PolicyEngineConfig,
    RayRuntimeConfig,
    VLLMEngineConfig,
)
from skirl.duties import StepDuties
from skirl.errors import CheckpointError, ConfigError
from skirl.evaluation.report import summary_table, write_evaluation
from skirl.evaluation.runner import Evaluator, check_references
from skirl.loop import Parts, run
from skirl.models.loading import (
    ModelFiles,
    load_tokenizer_and_family,
    stop_ids,
)
from skirl.models.vocabulary import check_critic
from skirl.prompts.decode import padded_num_samples
from skirl.prompts.source import ShuffledPrompts, check_enough
from skirl.prompts.validate import load_prompts
from skirl.protocols import GroupSampler, Record
from skirl.records import Prompt, RewardSample, Row, Sampling, TrainingSequence
from skirl.rewards.pool import RewardPool
from skirl.rollouts.parse import sample_maker
from skirl.rollouts.render import Renderer
from skirl.rollouts.router import Router
from skirl.runtime import process_groups
from skirl.runtime.device import collective_backend, pick_device
from skirl.runtime.env import declare_rank, prepare_environment
from skirl.runtime.local import LocalWorkers
from skirl.runtime.stopping import StopRequest, stopping
from skirl.runtime.worker import WorkerSpec
from skirl.runtime.workers import EngineSetup, Workers
from skirl.step import Method, probe_sequence, score_one, supervised_sequence, value_one
from skirl.tracking.ledger import Ledger
from skirl.tracking.run_directory import RunDirectory
from skirl.tracking.tracker import Tracker, open_tracker
from skirl.training.checkpoint import Checkpoints
from skirl.training.export import Exports
from skirl.training.objective import PolicyObjective
from skirl.training.value_objective import ValueObjective

__all__ = [
    "Setup",
    "make_duties",
    "make_setup",
    "opened",
    "policy_objective",
    "rewards_of",
    "run_eval",
    "run_train",
    "started",
    "steps_done",
    "tracked",
]

log = logging.getLogger(__name__)

EXPORT_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.2}


# ------------------------------------------------------------------------------------------------------------ commands
def run_train(loaded: Loaded) -> None:
    """``skirl train``: reinforcement learning."""
    config = loaded.config
    assert config.train is not None  # checked by config.check
    assert config.reward is not None
    prepare_environment()
    setup = make_setup(config)
    if config.critic_in_use is not None and config.critic_in_use.path is not None:
        check_critic(config.critic_in_use.path, setup.files, config.model.path)
    train, held_out = setup.prompts("train"), setup.prompts("eval")
    check_enough(train, config.train.prompts_per_step, "train.prompts_per_step")
    setup.check_room(train)
    log.info("%s", method_record(config))
    with opened(config, "train") as directory, rewards_of(setup) as pool:
        engine = setup.engine([*train, *held_out])
        with started(_train_spec(config, setup), "train", engine) as workers:
            pool.attach(workers)  # it asks the local reward models, which are loaded by now
            source, ledger, method = ShuffledPrompts(train, config.run.seed), Ledger(), setup.method()
            kept = {"prompts": source, "ledger": ledger, "method": method}
            first = steps_done(config, directory, workers, {name: part.restore for name, part in kept.items()})
            router = Router(workers.engines, pool, config.run.seed, timeout_s=setup.request_timeout_s)
            with tracked(config, directory, config.train.steps) as tracker, stopping() as stop:
                commits = probed(
                    config, workers, train, setup.sampling, placeholder_id=setup.placeholder_id, tracker=tracker
                )
                duties = make_duties(
                    setup,
                    directory,
                    tracker,
                    workers,
                    sample=router.sample,
                    held_out=held_out,
                    probe=setup.probe(train[0]),
                    sampling=setup.sampling,
                    state=lambda: {name: part.state() for name, part in kept.items()},
                    last_step=config.train.steps,
                    stop=stop,
                    critic=config.critic_in_use is not None,
                )
                parts = Parts(
                    prompts=source,
                    collect=_collector(setup, router, ledger, tracker, record=duties.record, pool=pool),
                    method=method,
                    trainer=workers,
                    weights=commits,
                    ledger=ledger,
                    tracker=tracker,
                    record=duties.record,
                    end_of_step=duties,
                    keep=duties.keep,
                    max_tokens=config.trainer.max_tokens_per_micro_batch,
                    prompts_per_step=config.train.prompts_per_step,
                )
                if first == 0:
                    duties.begin({} if engine is None else commits.commit(0))
                else:
                    duties.go_on(first)
                run(parts, range(first, config.train.steps))
            duties.show(output())


def _train_spec(config: Config, setup: "Setup") -> WorkerSpec:
    assert config.train is not None
    assert config.reward is not None
    critic = config.critic_in_use
    return WorkerSpec(
        config,
        policy_objective(config.method, setup.sampling),
        config.train.steps * config.train.prompts_per_step,
        with_reference=config.method.kl is not None,
        critic_objective=None if critic is None else ValueObjective(clip=critic.value_clip),
        reward_models=tuple(config.reward.models),
    )


def _collector(
    setup: "Setup", router: Router, ledger: Ledger, tracker: Tracker, *, record: Record, pool: RewardPool
) -> StepCollector:
    config = setup.config
    assert config.reward is not None
    return StepCollector(
        router,
        ledger,
        tracker,
        config.reward,
        record=record,
        sampling=setup.sampling,
        group_size=config.rollout.group_size,
        dynamic=config.method.dynamic_sampling,
        reward_metrics=pool.metrics,
    )


def run_eval(loaded: Loaded) -> None:
    """``skirl eval``: held-out error rates, written to run.dir/eval."""
    config = loaded.config
    prepare_environment()
    setup = make_setup(config)
    held_out = setup.prompts("eval")
    engine = setup.engine(held_out, from_checkpoint=True)
    with started(WorkerSpec(config, None, 1, with_reference=False), "eval", engine) as workers:
        router = Router(workers.engines, None, config.run.seed, timeout_s=setup.request_timeout_s)
        evaluator = Evaluator(config.evaluation, router.sample, setup.to_samples, setup.sampling, config.run.seed)
        found = evaluator.run(held_out, lambda group: None)
    target = config.run.dir / "eval"
    write_evaluation(target, found)
    output().print(summary_table(found, f"{config.model.path}"))
    output().print(f"every utterance, worst first: {target / 'alignments.txt'}")


# ----------------------------------------------------------------------------------------------- driver's side of a run
@dataclass(frozen=True)
class Setup:
    """What the driver knows of model and data before anything heavy starts."""

    config: Config
    files: ModelFiles
    renderer: Renderer
    sampling: Sampling
    placeholder_id: int | None
    to_samples: Callable[..., list[RewardSample]]

    def prompts(self, split: Literal["train", "eval"], check: Callable[[Prompt], None] | None = None) -> list[Prompt]:
        """Rendered rows of a split; the validation report is logged, or raised with the rows that are invalid.

        Args: check: raises DataError for a prompt that the command cannot use.
        """
        sources = self.config.data.train if split == "train" else self.config.data.eval
        if not sources:
            return []

        def make(row: Row) -> Prompt:
            prompt = self.renderer.prompt(row)
            if check is not None:
                check(prompt)
            return prompt

        prompts, report = load_prompts(sources, self.config.data, make)
        log.info("data.%s: %s", split, report.render())
        if split == "eval":
            check_references(prompts)
        return prompts

    def check_room(self, prompts: Sequence[Prompt]) -> None:
        """Raises ConfigError where a prompt and a response that uses its budget are more than one pass takes."""
        trainer, budget = self.config.trainer, self.sampling.max_new_tokens
        caps = {"max_tokens_per_micro_batch": trainer.max_tokens_per_micro_batch}
        if trainer.max_tokens_per_scoring_batch is not None:
            caps["max_tokens_per_scoring_batch"] = trainer.max_tokens_per_scoring_batch
        name, cap = min(caps.items(), key=lambda item: item[1])
        longest = max(prompts, key=lambda prompt: len(prompt.input_ids), default=None)
        size = 0 if longest is None else len(longest.input_ids)
        if longest is not None and size + budget > cap:
            raise ConfigError(
                f"prompt {longest.id} has {size} tokens, with rollout.sampling.max_new_tokens = {budget} for its "
                f"response {size + budget}, and a pass takes trainer.{name} = {cap}: raise that, lower the budget, or "
                "leave such rows out"
            )

    def supervised(self, prompt: Prompt) -> TrainingSequence:
        """A prompt with its reference answer as a training sequence."""
        return supervised_sequence(prompt, self.renderer.target(prompt), self.placeholder_id)

    def probe(self, prompt: Prompt) -> TrainingSequence:
        """What an exported model is compared on; rows without a reference serve too."""
        target = [] if prompt.answer is None else self.renderer.target(prompt)
        return probe_sequence(prompt, target, self.placeholder_id)

    def engine(self, prompts: Sequence[Prompt], *, from_checkpoint: bool = False) -> EngineSetup | None:
        """What engines in other processes are made from; None where the policy samples itself."""
        return engine_setup(self.config, self.files, prompts, self.sampling, from_checkpoint=from_checkpoint)

    @property
    def request_timeout_s(self) -> float | None:
        """Deadline of one call to an engine."""
        engine = self.config.rollout.engine
        return engine.request_timeout_s if isinstance(engine, VLLMEngineConfig) else None

    def method(self) -> Method:
        """The host side of the algorithm."""
        trainer, critic = self.config.trainer, self.config.critic_in_use
        return Method(
            self.config.method,
            placeholder_id=self.placeholder_id,
            max_scoring_tokens=trainer.max_tokens_per_scoring_batch or trainer.max_tokens_per_micro_batch,
            seed=self.config.run.seed,
            critic_warmup_steps=0 if critic is None else critic.warmup_steps,
        )


def make_setup(config: Config) -> Setup:
    """Model files and what follows from them."""
    files = load_tokenizer_and_family(config.model.path)
    family, forced = files.family, config.data.prompt == "forced"
    ids = files.tokenizer.convert_tokens_to_ids
    return Setup(
        config=config,
        files=files,
        renderer=Renderer(family, files.tokenizer, files.config, forced=forced, num_samples=padded_num_samples),
        sampling=Sampling(
            **config.rollout.sampling.model_dump(),
            stop_ids=stop_ids(config.model.path, files),
            banned_ids=tuple(sorted(ids(list(family.banned)))),
        ),
        placeholder_id=None if family.placeholder is None else ids(family.placeholder),
        to_samples=sample_maker(family, forced=forced),
    )


def policy_objective(method: MethodConfig, sampling: Sampling) -> PolicyObjective:
    """The device side of the algorithm; the factor of the KL comes with each step's plan."""
    return PolicyObjective(
        sampling=sampling,
        loss=method.policy_loss,
        kl_estimator="k2" if method.kl is not None and method.kl.estimator == "k2" else "k3",
        entropy_coef=method.entropy_coef,
    )


@contextmanager
def opened(config: Config, command: Command) -> Iterator[RunDirectory]:
    """The run directory, with its log; closed whatever happens."""
    directory = RunDirectory.open(
        config.run.dir, resume=config.run.resume, config=config.model_dump(mode="json"), command=command
    )
    setup_logging(config.run.dir)
    try:
        yield directory
    finally:
        directory.close()


@contextmanager
def rewards_of(setup: Setup) -> Iterator[RewardPool]:
    """What scores responses, ready; its processes end whatever happens."""
    config = setup.config
    assert config.reward is not None
    pool = RewardPool(config.reward, setup.to_samples, output=config.run.dir / "reward_output.log")
    try:
        pool.start()  # a file that cannot be loaded is reported before any model is
        yield pool
    finally:
        pool.close()


@contextmanager
def tracked(config: Config, directory: RunDirectory, total_steps: int) -> Iterator[Tracker]:
    """The tracker of a run with the sinks that the recipe asks for."""
    unit = config.evaluation.unit
    names = {"char": "CER", "word": "WER", "mixed": "MER", "auto": "error"}
    with open_tracker(
        directory,
        total_steps,
        tensorboard=config.run.tensorboard,
        progress=config.run.progress,
        error_name=names[unit],
        console=terminal(),
    ) as tracker:
        yield tracker


def steps_done(
    config: Config,
    directory: RunDirectory,
    workers: Workers,
    restore: Mapping[str, Callable[[Mapping[str, Any]], None]],
) -> int:
    """Steps already done: 0, or those of the newest complete checkpoint, which is then loaded."""
    if not directory.resumed:
        return 0
    state = Checkpoints(directory.checkpoints, config.run.keep_checkpoints).load_latest(workers.load)
    directory.rewind(None if state is None else state["step"])
    if state is None:
        log.warning("%s holds no complete checkpoint: the run starts over", directory.checkpoints)
        return 0
    for name, put_back in restore.items():
        if name not in state:
            raise CheckpointError(
                f"the newest checkpoint in {directory.checkpoints} has no state of {name!r}: it was written by another "
                "version of skirl or by another command. Start a new run, or resume with what wrote it."
            )
        put_back(state[name])
    log.info("continuing after step %d", state["step"])
    return int(state["step"])


def make_duties(
    setup: Setup,
    directory: RunDirectory,
    tracker: Tracker,
    workers: Workers,
    *,
    sample: GroupSampler,
    held_out: Sequence[Prompt],
    probe: TrainingSequence,
    sampling: Sampling,
    state: Callable[[], Mapping[str, Any]],
    last_step: int,
    stop: StopRequest,
    critic: bool = False,
) -> StepDuties:
    """What is due after each step of a run, see ``StepDuties``. ``critic``: the run has one, which is exported too."""
    config = setup.config
    return StepDuties(
        directory,
        tracker,
        workers,
        run_config=config.run,
        evaluation=config.evaluation,
        evaluator=Evaluator(config.evaluation, sample, setup.to_samples, setup.sampling, config.run.seed),
        exports=Exports(
            directory.exports,
            probe,
            lambda: score_one(workers, probe),
            sampling,
            tolerance=EXPORT_TOLERANCE[config.model.dtype],
            critic=(lambda: value_one(workers, probe)) if critic else None,
        ),
        held_out=held_out,
        state=state,
        last_step=last_step,
        stop=stop,
    )


# ------------------------------------------------------------------------------------------------------------- workers
@contextmanager
def started(spec: WorkerSpec, command: Command, engine: EngineSetup | None) -> Iterator[Workers]:
    """The processes of a run on the recipe's runtime; ended and given back whatever happens."""
    workers = _start(spec, command, engine)
    try:
        log.info("%s", workers.describe())
        yield workers
    finally:
        with suppress(KeyboardInterrupt):  # a second Ctrl-C must not leave processes behind
            workers.shutdown()


def _start(spec: WorkerSpec, command: Command, engine: EngineSetup | None) -> Workers:
    runtime, trainer, sampler = spec.config.runtime, spec.config.trainer, spec.config.rollout.engine
    if isinstance(runtime, RayRuntimeConfig):
        from skirl.runtime.ray.launch import launch

        return launch(spec, command, engine)
    assert isinstance(sampler, PolicyEngineConfig)  # checked by config.check
    if runtime.threads is not None:
        torch.set_num_threads(runtime.threads)
    if isinstance(trainer.backend, DeepSpeedBackendConfig) and spec.objective is not None:
        declare_rank(0, 1)
        process_groups.join_alone(collective_backend(pick_device()))
    return LocalWorkers(build_worker(spec), num_ranks=trainer.ranks, batch_size=sampler.batch_size)
