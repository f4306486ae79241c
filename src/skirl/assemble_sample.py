"""Wiring of ``skirl sample``: batch inference by any engine, scored or not, written as rows to learn from.

prompts that are not done -> rounds -> groups -> (scores) -> rows, prompt by prompt
"""

import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext

from skirl.assemble import Setup, make_setup, opened, rewards_of, started, tracked
from skirl.cli.console import output
from skirl.config.load import Loaded
from skirl.config.offline import SampleConfig
from skirl.config.schema import Config, PolicyEngineConfig
from skirl.errors import ConfigError
from skirl.records import Prompt, Score, ScoredGroup
from skirl.rewards.policy import apply_failures
from skirl.rollouts.router import Router
from skirl.runtime.env import prepare_environment
from skirl.runtime.worker import WorkerSpec
from skirl.samples import SampleFile, measure_samples, select_rows
from skirl.tracking.run_directory import RunDirectory
from skirl.tracking.tracker import Tracker

__all__ = ["run_sample"]

log = logging.getLogger(__name__)

ROUNDS_AHEAD = 4
"""Engine loads in one round: enough that few engines wait for a round's last response, few enough to lose little."""


def run_sample(loaded: Loaded) -> None:
    """``skirl sample``: responses to the prompts of data.train, as JSON lines."""
    config = loaded.config
    how = config.sample
    assert how is not None  # checked by config.check
    _check(config, how)
    prepare_environment()
    setup = make_setup(config)
    prompts = setup.prompts("train")
    with opened(config, "sample") as directory:
        file = SampleFile(how.output or directory.path / "samples.jsonl", resume=config.run.resume)
        rest = [prompt for prompt in prompts if prompt.id not in file.done]
        log.info("%d of %d prompts are to be sampled, %d responses each", len(rest), len(prompts), how.num_samples)
        if directory.resumed:
            directory.rewind(len(file.done))
        if rest:
            engine = setup.engine(prompts, from_checkpoint=True)
            models = () if config.reward is None else tuple(config.reward.models)
            spec = WorkerSpec(config, None, 1, with_reference=False, reward_models=models)
            with (
                nullcontext() if config.reward is None else rewards_of(setup) as pool,
                started(spec, "sample", engine) as workers,
                tracked(config, directory, len(prompts)) as tracker,
            ):
                if pool is not None:
                    pool.attach(workers)
                router = Router(workers.engines, pool, config.run.seed, timeout_s=setup.request_timeout_s)
                size = _round_size(config, how, len(workers.engines))
                for start in range(0, len(rest), size):
                    _round(setup, router, rest[start : start + size], file, tracker)
        _report(directory, file)


def _check(config: Config, how: SampleConfig) -> None:
    if how.select == "pairs" and how.num_samples < 2:
        raise ConfigError(
            f"sample.select = pairs needs two responses a prompt, but sample.num_samples = {how.num_samples}: set it "
            "to 2 or more"
        )
    if config.rollout.sampling.temperature == 0 and how.num_samples > 1:
        log.warning(
            "rollout.sampling.temperature = 0 is greedy: the %d responses to each prompt will be equal; set it above "
            "0, or sample.num_samples to 1",
            how.num_samples,
        )


def _round_size(config: Config, how: SampleConfig, num_engines: int) -> int:
    """Prompts a round."""
    engine = config.rollout.engine
    load = engine.batch_size if isinstance(engine, PolicyEngineConfig) else engine.max_in_flight
    return max(1, ROUNDS_AHEAD * load * num_engines // how.num_samples)


def _round(setup: Setup, router: Router, prompts: Sequence[Prompt], file: SampleFile, tracker: Tracker) -> None:
    """Samples, scores and writes some prompts. What is written does not depend on how prompts are cut into rounds."""
    config, how = setup.config, setup.config.sample
    assert how is not None
    begin = time.perf_counter()
    with tracker.phase("sample", total=len(prompts) * how.num_samples, unit="responses") as bar:
        if config.reward is None:
            groups = router.sample(
                "sample",
                prompts,
                setup.sampling,
                how.num_samples,
                lambda group: bar.advance(len(group.rollouts), sum(len(r.response_ids) for r in group.rollouts)),
            )
            scored = [ScoredGroup(group, (Score(None),) * len(group.rollouts)) for group in groups]
        else:
            scored = router.collect(
                "sample",
                prompts,
                setup.sampling,
                how.num_samples,
                lambda rollout: bar.advance(tokens=len(rollout.response_ids)),
            )
            apply_failures(scored, config.reward)  # raises where too many failed
    seconds = time.perf_counter() - begin
    whole_groups = config.reward is not None and config.reward.on_failure == "drop_group"
    with tracker.phase("write"):
        for group in scored:
            file.add(group.group.prompt.id, select_rows(group, how, whole_groups=whole_groups))
    tracker.log(len(file.done), measure_samples(scored, seconds, file.num_rows))


def _report(directory: RunDirectory, file: SampleFile) -> None:
    directory.event("sampled", prompts=len(file.done), rows=file.num_rows, path=str(file.path))
    output().print(f"{file.num_rows} rows of {len(file.done)} prompts: {file.path}", soft_wrap=True, highlight=False)
    if file.num_rows == 0:
        log.warning(
            "no response qualified: look at sample.select, sample.min_score and rollout.sampling.max_new_tokens"
        )
