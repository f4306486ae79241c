"""One step of ``skirl train`` after the other, on fakes: what is asked of whom, committed, counted and logged."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from skirl.assemble import Setup
from skirl.collect import StepCollector
from skirl.config.method import MethodConfig
from skirl.config.rewards import RewardConfig
from skirl.config.schema import Config
from skirl.errors import ConfigError
from skirl.loop import Parts, run
from skirl.prompts.source import ShuffledPrompts
from skirl.records import Prompt, Ratio, Sampling
from skirl.rollouts.router import Router
from skirl.step import Method
from skirl.testing.fake_engine import FakeEngine
from skirl.testing.fake_scorer import FakeScorer
from skirl.testing.fake_trainer import FakeTrainer
from skirl.tracking.json_lines import read_records
from skirl.tracking.ledger import Ledger
from skirl.tracking.progress import ProgressDisplay
from skirl.tracking.run_directory import RunDirectory
from skirl.tracking.sinks.jsonl import JsonlSink
from skirl.tracking.tracker import Tracker


@pytest.mark.parametrize(("cap", "scoring", "named"), [(43, None, "micro_batch"), (100, 43, "scoring_batch")])
def test_a_prompt_whose_response_would_not_fit_is_refused_before_anything_starts(cap, scoring, named):
    trainer = {"max_tokens_per_micro_batch": cap, "max_tokens_per_scoring_batch": scoring}
    base = {"model": {"path": "m"}, "data": {}, "run": {"dir": "r"}, "trainer": trainer}
    sampling, nothing = Sampling(max_new_tokens=40), SimpleNamespace()
    setup = Setup(Config.model_validate(base), nothing, nothing, sampling, None, lambda group: [])
    fits, long = (Prompt(f"s/{n}", "s", (1,) * n, (1,) * n, (), None, None, None, {}) for n in (3, 4))
    setup.check_room([fits])
    with pytest.raises(ConfigError, match=rf"s/4 has 4 tokens, with .* = 40 for its response 44, .*per_{named} = 43"):
        setup.check_room([fits, long])


class Trainer(FakeTrainer):
    """Notes which roles were trained, at how many consumed prompts."""

    def __init__(self):
        super().__init__(lr=0.1)
        self.updates = []

    def update(self, plan, consumed_prompts, roles=("policy",)):
        self.updates.append((consumed_prompts, tuple(roles)))
        return super().update(plan, consumed_prompts, roles)


def started(tmp_path: Path, config: dict, *, score=lambda r: float(len(r.text)), warmup=0, prompts=8):
    """Two prompts a step; returns what ``go`` needs."""
    run_dir = RunDirectory.open(tmp_path / "run", resume=False, config={}, command="train")
    tracker = Tracker(run_dir, [JsonlSink(run_dir.metrics_file)], ProgressDisplay(None), 10)
    trainer, ledger, recorded = Trainer(), Ledger(), []
    settings = MethodConfig.model_validate(config)
    method = Method(settings, placeholder_id=None, max_scoring_tokens=400, critic_warmup_steps=warmup)

    def record(step, scored, sequences):
        recorded.append((step, len(scored), len(sequences)))

    collector = StepCollector(
        Router([FakeEngine()], FakeScorer(score), seed=0),
        ledger,
        tracker,
        RewardConfig.model_validate({"terms": {"acc": "accuracy"}}),
        record=record,
        sampling=Sampling(max_new_tokens=40, stop_ids=(257,)),
        group_size=4,
        dynamic=settings.dynamic_sampling,
    )
    rows = [Prompt(f"p{i}", "made", (1, 2), (1, 2), (), None, None, None, {}) for i in range(prompts)]
    parts = Parts(
        prompts=ShuffledPrompts(rows, 0),
        collect=collector,
        method=method,
        trainer=trainer,
        weights=trainer,
        ledger=ledger,
        tracker=tracker,
        record=record,
        end_of_step=lambda done: {"ledger/in_flight": Ratio(len(ledger.in_flight), 1)},
        keep=lambda done: None,
        max_tokens=400,
        prompts_per_step=2,
    )
    return parts, trainer, recorded, run_dir


def go(parts, run_dir, steps):
    with parts.tracker:
        run(parts, steps)
    run_dir.close()
    return read_records(run_dir.metrics_file)


def test_a_step_trains_commits_records_and_counts(tmp_path):
    parts, trainer, recorded, run_dir = started(tmp_path, {"kl": None})
    lines = go(parts, run_dir, range(3))
    assert trainer.updates == [(2, ("policy",)), (4, ("policy",)), (6, ("policy",))]
    assert trainer.committed == [1, 2, 3]
    assert recorded == [(1, 2, 8), (2, 2, 8), (3, 2, 8)]
    assert [line["data/consumed_prompts"] for line in lines] == [2, 4, 6]
    assert lines[-1]["ledger/trained"] == lines[-1]["ledger/issued"] == 24
    assert {"advantage/std", "policy/loss", "collect/rounds"} <= lines[0].keys()


def test_the_metrics_of_a_step_are_on_disk_before_its_checkpoint(tmp_path):
    """A run that is killed as it ends its checkpoint goes on after that step, and logs it no more."""
    parts, _, _, run_dir = started(tmp_path, {"kl": None})
    logged = []

    def keep(done):
        logged.append([line["step"] for line in read_records(run_dir.metrics_file)])
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go(replace(parts, keep=keep), run_dir, range(3))
    assert logged == [[1], [1, 2]]


def test_a_clip_whose_name_is_not_utf_8_is_sampled_and_trained_on(tmp_path):
    """Its name is part of the prompt's id, from which seeds and the plan's hash are made."""
    parts, _, recorded, run_dir = started(tmp_path, {"kl": None})
    rows = [Prompt(f"clip \udcff:{i}", "made", (1, 2), (1, 2), (), None, None, None, {}) for i in range(2)]
    lines = go(replace(parts, prompts=ShuffledPrompts(rows, 0)), run_dir, range(1))
    assert recorded == [(1, 2, 8)]
    assert lines[0]["ledger/trained"] == 8


@pytest.mark.parametrize("warmup", [0, 2])
def test_the_critic_warms_up_alone(tmp_path, warmup):
    """Nothing is committed, and no factor moves, while the policy stays as it is."""
    kl = {"where": "reward", "estimator": "k1", "coef": 0.1, "adaptive": {"target": 2.0, "horizon": 100}}
    config = {"preset": "ppo", "mini_batches": 1, "kl": kl}
    parts, trainer, _, run_dir = started(tmp_path, config, warmup=warmup)
    lines = go(parts, run_dir, range(3))
    both = ("policy", "critic")
    assert [roles for _, roles in trainer.updates] == ([("critic",)] * 2 + [both] if warmup else [both] * 3)
    assert trainer.committed == ([1] if warmup else [1, 2, 3])
    assert ("policy/loss" in lines[0]) == (not warmup)
    coefs = [line["kl/coef"] for line in lines]
    assert (coefs[1] == 0.1) == bool(warmup)
    assert lines[-1]["ledger/trained"] == 24


def test_dynamic_sampling_counts_every_prompt_it_takes_and_leaves_the_schedule_alone(tmp_path):
    def score(rollout):
        return float(rollout.sample_index % 2) if rollout.prompt_id in ("p1", "p4", "p6") else 1.0

    config = {"kl": None, "dynamic_sampling": {"keep": "mean_range", "max_rounds": 20}}
    parts, trainer, recorded, run_dir = started(tmp_path, config, score=score)
    lines = go(parts, run_dir, range(2))
    assert [consumed for consumed, _ in trainer.updates] == [2, 4], "schedules follow the steps"
    taken = [line["data/consumed_prompts"] for line in lines]
    assert taken[0] > 2
    assert taken[1] == parts.prompts.num_taken == sum(groups for _, groups, _ in recorded)
    assert lines[-1]["ledger/trained"] == 16
    assert lines[-1]["ledger/dropped/no_signal"] == 4 * (taken[1] - 4)
    assert lines[0]["collect/groups_without_signal"] == taken[0] - 2
