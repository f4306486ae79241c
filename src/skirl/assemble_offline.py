"""Wiring of the commands that learn from data sets; the counterpart of ``assemble``.

recipe -> rows -> examples (rendered, or refused with all that is wrong) -> lesson -> workers -> the one loop
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from skirl.assemble import EXPORT_TOLERANCE, Setup, make_duties, make_setup, opened, started, steps_done, tracked
from skirl.assemble_engines import CommitBeforeSampling, probed
from skirl.cli.console import output
from skirl.config.check import Command
from skirl.config.load import Loaded
from skirl.config.offline import DPOConfig
from skirl.config.schema import Config
from skirl.duties import StepDuties
from skirl.errors import ConfigError, ModelError
from skirl.lessons import Example, ExampleMaker, Form, Lesson, SequencesOf, check_mismatched, score_statistics
from skirl.loop import SupervisedParts, run_supervised
from skirl.models.scalar_heads import MEAN, STD, ScalarHead
from skirl.prompts.conversation import Conversation, conversation
from skirl.prompts.manifests.columns import Source
from skirl.prompts.preference import Labelled, Pair, labelled, pair
from skirl.prompts.source import ShuffledPrompts, check_enough
from skirl.prompts.steps import Steps, steps
from skirl.prompts.validate import HasRow, TooManyTokens, load_examples
from skirl.protocols import GroupSampler, WeightCommit
from skirl.records import Prompt, Ratio, TrainingSequence
from skirl.rollouts.router import Router
from skirl.runtime.env import prepare_environment
from skirl.runtime.stopping import stopping
from skirl.runtime.worker import WorkerSpec
from skirl.runtime.workers import Workers
from skirl.step import rollout_sequence, score_one
from skirl.tracking.json_lines import replace_file
from skirl.tracking.run_directory import RunDirectory
from skirl.training.export import Exports
from skirl.training.objective import DistillationObjective, Objective, SupervisedObjective
from skirl.training.preference_objective import PreferenceObjective, RewardModelObjective
from skirl.training.value_objective import StepRewardObjective

__all__ = ["run_dpo", "run_kd", "run_prm", "run_rm", "run_sft"]

log = logging.getLogger(__name__)

HELD_OUT = "held-out"
"""Key of the samples of an evaluation: each draws the same random numbers."""


@dataclass(frozen=True)
class Course:
    """What one command learns from which rows.

    Attributes:
        train, held_out: rendered rows; empty for speech, whose prompts are turned into sequences as they are taken.
        trains: what the role "policy" is (``WorkerSpec.trains``).
        samples: the policy samples in every step.
    """

    command: Command
    steps: int
    batch_size: int
    objective: Objective
    train: Sequence[Example]
    held_out: Sequence[Example]
    form: Form = field(default_factory=Form)
    trains: Literal["policy", "value", "distilled"] = "policy"
    samples: bool = False


# ------------------------------------------------------------------------------------------------------------- commands
def run_sft(loaded: Loaded) -> None:
    """``skirl sft``: text is judged by its held-out loss, speech by its error rates."""
    setup = _begin(loaded)
    sft = setup.config.sft
    assert sft is not None  # checked by config.check, as in each command below
    if setup.placeholder_id is not None:
        _learn_speech(setup)
        return

    def build(maker: ExampleMaker, row: Conversation) -> Example:
        return maker.conversation(row, sft.turns)

    train, held_out = _examples(setup, conversation, build)
    _learn(setup, Course("sft", sft.steps, sft.batch_size, SupervisedObjective(), train, held_out))


def run_rm(loaded: Loaded) -> None:
    """``skirl rm``: a reward model from pairs."""
    setup = _begin(loaded)
    rm = setup.config.rm
    assert rm is not None

    def build(maker: ExampleMaker, row: Pair) -> Example:
        return maker.pair(row if rm.use_margin else replace(row, margin=0.0), at="last")

    train, held_out = _examples(setup, partial(pair, needs_margin=rm.use_margin), build)
    form, objective = Form("sequence", paired=True), RewardModelObjective(rm)
    _learn(setup, Course("rm", rm.steps, rm.batch_size, objective, train, held_out, form=form, trains="value"))


def run_prm(loaded: Loaded) -> None:
    """``skirl prm``: a process reward model from labelled steps."""
    setup = _begin(loaded)
    prm = setup.config.prm
    assert prm is not None

    def build(maker: ExampleMaker, row: Steps) -> Example:
        return maker.steps(row, prm.separator)

    train, held_out = _examples(setup, steps, build)
    _learn(setup, Course("prm", prm.steps, prm.batch_size, StepRewardObjective(), train, held_out, trains="value"))


def run_dpo(loaded: Loaded) -> None:
    """``skirl dpo``: preference losses, from pairs; kto from single labelled responses."""
    setup = _begin(loaded)
    dpo = setup.config.dpo
    assert dpo is not None
    kto = dpo.loss.kind == "kto"
    train, held_out = _labelled_examples(setup, dpo) if kto else _examples(setup, pair, _whole_pair)
    form = Form("sequence", paired=not kto, with_reference=dpo.loss.kind in ("dpo", "ipo", "kto"), with_baseline=kto)
    _learn(setup, Course("dpo", dpo.steps, dpo.batch_size, PreferenceObjective(dpo.loss), train, held_out, form=form))


def run_kd(loaded: Loaded) -> None:
    """``skirl kd``: a teacher's distribution on the rows' answers, or on the policy's own."""
    setup = _begin(loaded)
    kd = setup.config.kd
    assert kd is not None
    own = kd.data == "on_policy"

    def build(maker: ExampleMaker, row: Conversation) -> Example:
        return maker.prompt(row, setup.sampling.max_new_tokens) if own else maker.conversation(row, "all")

    train, held_out = _examples(setup, partial(conversation, needs_answer=not own), build)
    objective = DistillationObjective(kd.share)
    course = Course("kd", kd.steps, kd.batch_size, objective, train, held_out, trains="distilled", samples=own)
    _learn(setup, course)


# ----------------------------------------------------------------------------------------------------------------- rows
def _begin(loaded: Loaded) -> Setup:
    prepare_environment()
    return make_setup(loaded.config)


Parsed = TypeVar("Parsed", bound=HasRow)


def _examples(
    setup: Setup,
    parse: Callable[[Source, Mapping[str, Any], str], Parsed],
    build: Callable[[ExampleMaker, Parsed], Example],
) -> tuple[list[Example], list[Example]]:
    """Training and held-out rows; the reports are logged, or raised with the rows that are invalid."""
    data = setup.config.data
    maker = ExampleMaker(setup.renderer, end_ids=setup.sampling.stop_ids, max_tokens=_cap(setup.config))
    found: list[list[Example]] = []
    for name, sources in (("train", data.train), ("eval", data.eval)):
        examples: list[Example] = []
        if sources:
            examples, report = load_examples(sources, data, parse, partial(build, maker))
            log.info("data.%s: %s", name, report.render())
        found.append(examples)
    return found[0], found[1]


def _cap(config: Config) -> int:
    """Tokens that fit into every pass."""
    trainer = config.trainer
    scoring = trainer.max_tokens_per_scoring_batch or trainer.max_tokens_per_micro_batch
    return min(trainer.max_tokens_per_micro_batch, scoring)


def _whole_pair(maker: ExampleMaker, row: Pair) -> Example:
    return maker.pair(row, at="all")


def _labelled_examples(setup: Setup, dpo: DPOConfig) -> tuple[list[Example], list[Example]]:
    """Rows of kto, which scores each prompt with another row's response."""
    if dpo.batch_size < 2:
        raise ConfigError(
            f"dpo.batch_size = {dpo.batch_size}, but kto scores each prompt with another response of the step: set it "
            "to 2 or more"
        )

    def build(maker: ExampleMaker, row: Labelled) -> Example:
        return maker.labelled(row)

    found = _examples(setup, labelled, build)
    for examples in found:
        check_mismatched(examples, _cap(setup.config))
    return found


# ------------------------------------------------------------------------------------------------------------- learning
def _learn(setup: Setup, course: Course) -> None:
    """One run of a command that is judged by its held-out loss."""
    config, prompts = setup.config, [example.prompt for example in course.train]
    check_enough(prompts, course.batch_size, f"{course.command}.batch_size")
    spec = WorkerSpec(
        config,
        course.objective,
        course.steps * course.batch_size,
        with_reference=course.form.with_reference,
        samples=course.samples,
        trains=course.trains,
    )
    engine = setup.engine([*prompts, *(e.prompt for e in course.held_out)]) if course.samples else None
    with opened(config, course.command) as directory, started(spec, course.command, engine) as workers:
        source = ShuffledPrompts(prompts, config.run.seed)
        first = steps_done(config, directory, workers, {"prompts": source.restore})
        with tracked(config, directory, course.steps) as tracker, stopping() as stop:
            weights: WeightCommit = _NothingSamples()
            sample: GroupSampler | None = None
            if course.samples:
                sample = Router(workers.engines, None, config.run.seed, timeout_s=setup.request_timeout_s).sample
                weights = probed(config, workers, prompts, setup.sampling, placeholder_id=None, tracker=tracker)
            duties = StepDuties(
                directory,
                tracker,
                workers,
                run_config=config.run,
                evaluation=config.evaluation,
                evaluator=None,
                exports=_exports(setup, course, directory, workers),
                held_out=(),
                state=lambda: {"prompts": source.state()},
                last_step=course.steps,
                stop=stop,
                losses=_losses(setup, course, workers, sample) if course.held_out else None,
            )
            if first == 0:
                duties.begin({} if engine is None else weights.commit(0))
            else:
                duties.go_on(first)
            parts = SupervisedParts(
                prompts=source,
                lesson=_lesson(setup, course.train, course.form, sample),
                trainer=workers,
                weights=weights,
                tracker=tracker,
                end_of_step=duties,
                keep=duties.keep,
                max_tokens=config.trainer.max_tokens_per_micro_batch,
                batch_size=course.batch_size,
            )
            run_supervised(parts, range(first, course.steps))
        duties.show(output())


def _learn_speech(setup: Setup) -> None:
    """``skirl sft`` on speech: transcripts of the held-out clips are scored."""
    config = setup.config
    sft = config.sft
    assert sft is not None
    train, held_out = setup.prompts("train", _room(setup)), setup.prompts("eval")
    check_enough(train, sft.batch_size, "sft.batch_size")
    objective = SupervisedObjective()
    with opened(config, "sft") as directory:
        spec = WorkerSpec(config, objective, sft.steps * sft.batch_size, with_reference=False)
        engine = setup.engine([*train, *held_out]) if held_out else None  # nothing else is sampled
        with started(spec, "sft", engine) as workers:
            source = ShuffledPrompts(train, config.run.seed)
            first = steps_done(config, directory, workers, {"prompts": source.restore})
            router = Router(workers.engines, None, config.run.seed, timeout_s=setup.request_timeout_s)
            commits = CommitBeforeSampling(workers, router.sample, held=first if first else None)
            with tracked(config, directory, sft.steps) as tracker, stopping() as stop:
                duties = make_duties(
                    setup,
                    directory,
                    tracker,
                    workers,
                    sample=commits.sample,
                    held_out=held_out,
                    probe=setup.probe(train[0]),
                    sampling=objective.sampling,
                    state=lambda: {"prompts": source.state()},
                    last_step=sft.steps,
                    stop=stop,
                )
                parts = SupervisedParts(
                    prompts=source,
                    lesson=Lesson(_spoken(setup), Form(), max_scoring_tokens=_cap(config)),
                    trainer=workers,
                    weights=commits,
                    tracker=tracker,
                    end_of_step=duties,
                    keep=duties.keep,
                    max_tokens=config.trainer.max_tokens_per_micro_batch,
                    batch_size=sft.batch_size,
                )
                if first == 0:
                    duties.begin({})
                else:
                    duties.go_on(first)
                run_supervised(parts, range(first, sft.steps))
            duties.show(output())


def _room(setup: Setup) -> Callable[[Prompt], None]:
    """Raises TooManyTokens: a prompt and its answer are more than a micro-batch holds."""
    cap = setup.config.trainer.max_tokens_per_micro_batch

    def check(prompt: Prompt) -> None:
        size = len(prompt.input_ids) + len(setup.renderer.target(prompt))
        if size > cap:
            raise TooManyTokens(f"it has {size} tokens, and trainer.max_tokens_per_micro_batch is {cap}")

    return check


def _spoken(setup: Setup) -> SequencesOf:
    """Speech is turned into sequences as it is taken: prompts are long, and their references short."""

    def sequences_of(key: str, prompts: Sequence[Prompt]) -> list[TrainingSequence]:
        return [setup.supervised(prompt) for prompt in prompts]

    return sequences_of


def _lesson(setup: Setup, examples: Sequence[Example], form: Form, sample: GroupSampler | None) -> Lesson:
    """What is learned from these rows: their sequences, or (with ``sample``) the policy's answers to them."""
    by_id = {example.prompt.id: example.sequences for example in examples}

    def rendered(key: str, prompts: Sequence[Prompt]) -> list[TrainingSequence]:
        return [sequence for prompt in prompts for sequence in by_id[prompt.id]]

    def answered(key: str, prompts: Sequence[Prompt]) -> list[TrainingSequence]:
        assert sample is not None
        groups = sample(key, prompts, setup.sampling, 1, lambda group: None)
        return [rollout_sequence(group.prompt, group.rollouts[0], None) for group in groups]

    return Lesson(rendered if sample is None else answered, form, max_scoring_tokens=_cap(setup.config))


def _losses(
    setup: Setup, course: Course, workers: Workers, sample: GroupSampler | None
) -> Callable[[], dict[str, Ratio]]:
    """eval/<source>/loss and eval/<source>/accuracy by the current weights."""
    lesson = _lesson(setup, course.held_out, course.form, sample)
    by_source: dict[str, list[Prompt]] = {}
    for example in course.held_out:
        by_source.setdefault(example.prompt.source, []).append(example.prompt)

    def evaluate() -> dict[str, Ratio]:
        return {
            f"eval/{source}/{name}": ratio
            for source, prompts in by_source.items()
            for name, ratio in lesson.evaluate(HELD_OUT, prompts, workers).items()
        }

    return evaluate


class _NothingSamples:
    """Commits of a run that samples nothing."""

    def commit(self, version: int) -> Mapping[str, Ratio]:
        """There is no engine that could hold the weights."""
        return {}


# ------------------------------------------------------------------------------------------------------------- exports
def _exports(setup: Setup, course: Course, directory: RunDirectory, workers: Workers) -> Exports:
    config, first = setup.config, course.train[0]
    probe = first.sequences[0] if first.sequences else setup.probe(first.prompt)

    def store(exported: Path) -> None:
        _store_scores(exported, *score_statistics(course.train, workers, _cap(config)))

    return Exports(
        directory.exports,
        probe,
        lambda: score_one(workers, probe),
        course.objective.sampling,
        tolerance=EXPORT_TOLERANCE[config.model.dtype],
        reads="at" if course.trains == "value" else "before",
        finish=store if course.command == "rm" else None,
    )


def _store_scores(exported: Path, mean: float, std: float) -> None:
    """Mean and standard deviation of a reward model's scores go into its config.json, where they are looked for."""
    try:
        ScalarHead("sequence").set_scores(mean, std)
    except ModelError as problem:
        log.warning("%s: no mean and standard deviation are stored: %s", exported, problem)
        return
    file = exported / "config.json"
    settings: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    replace_file(file, (json.dumps({**settings, MEAN: mean, STD: std}, indent=2) + "\n").encode())
    log.info("scores of the training pairs: mean %.4f, standard deviation %.4f", mean, std)
