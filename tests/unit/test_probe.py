"""The probe against an engine with exactly one fault: each cause is recognised, by experiment."""

import logging
import math
import zlib
from dataclasses import dataclass, field

import numpy as np
import pytest

from skirl import probe as probe_module
from skirl.config.schema import ProbeConfig
from skirl.probe import Probe, choose_prompt, sampled_by, scored_by
from skirl.records import Prompt, Rollout, Sampling
from skirl.rollouts.router import Router
from skirl.testing.fake_engine import FakeEngine
from skirl.testing.fake_trainer import FakeTrainer
from skirl.tracking.metrics import finish

V, D = 24, 8
RUN = Sampling(temperature=0.7, top_p=0.9, top_k=12, min_p=0.01, max_new_tokens=500)
PROMPT_IDS = (3, 1, 4, 1, 5)


def random_weights(seed):
    random = np.random.default_rng(seed)
    return {
        "embed": random.normal(size=(V, D)),
        "head": random.normal(size=(D, V)),
        "norm": random.normal(size=D),  # frozen: sent by whole commits only
    }


def log_softmax(logits):
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def distribution(logits, sampling):
    """[V] log-probs: temperature, min-p, top-k, top-p, renormalise; as vLLM does it, written out slowly."""
    logits = logits / sampling.temperature
    probs = np.exp(log_softmax(logits))
    keep = probs >= sampling.min_p * probs.max()
    order = sorted(np.flatnonzero(keep), key=lambda i: -probs[i])
    order = order[: sampling.top_k or V]
    total, kept, mass = sum(probs[i] for i in order), [], 0.0
    for i in order:
        kept.append(i)
        mass += probs[i] / total
        if mass >= sampling.top_p:
            break
    allowed = np.full(V, -math.inf)
    allowed[kept] = logits[kept]
    return log_softmax(allowed)


def next_logits(weights, context, last):
    return ((context + weights["embed"][last]) * weights["norm"]) @ weights["head"]


def context_of(weights, prompt):
    return weights["embed"][list(prompt)].mean(axis=0)


@dataclass
class World:
    """A trainer and an engine, with at most one fault between them."""

    keeps_cache: bool = False
    """Commits do not drop the prefix cache."""
    raw_logprobs: bool = False
    """The engine reports log-probs before temperature and filters."""
    loses_frozen: bool = False
    """The frozen tensor in the engine is garbage until it is sent again."""
    noise: float = 0.0
    """The engine computes a little differently."""
    nan_at: int | None = None
    """The engine reports NaN for this token."""
    length: int | None = None
    """Tokens of a response; else the budget."""
    calls: list[str] = field(default_factory=list)
    events: list[dict] = field(default_factory=list)

    def __post_init__(self):
        self.trainer = random_weights(0)
        self.engine = {name: values.copy() for name, values in self.trainer.items()}
        self.cache = {}

    def update(self, seed=1):
        """What an optimizer does."""
        moved = random_weights(seed)
        self.trainer |= {name: self.trainer[name] + 0.3 * moved[name] for name in ("embed", "head")}

    def commit(self, whole=False):
        if whole:
            self.calls.append("commit whole")
        self.engine |= {n: self.trainer[n].copy() for n in ("embed", "head", *(["norm"] if whole else []))}
        if self.loses_frozen and not whole:
            self.engine["norm"] = self.engine["norm"] * 0.5
        if not self.keeps_cache:
            self.cache.clear()

    def invalidate_caches(self):
        self.calls.append("invalidate")
        self.cache.clear()

    def sample(self, sampling, key):
        self.calls.append("sample")
        random = np.random.default_rng(zlib.crc32(key.encode()))
        context = self.cache.setdefault(PROMPT_IDS, context_of(self.engine, PROMPT_IDS))
        last, ids, found = PROMPT_IDS[-1], [], []
        for _ in range(sampling.max_new_tokens if self.length is None else self.length):
            logits = next_logits(self.engine, context, last)
            table = distribution(logits, sampling)
            last = int(random.choice(V, p=np.exp(table)))
            ids.append(last)
            found.append((log_softmax(logits) if self.raw_logprobs else table)[last] + self.noise)
        if self.nan_at is not None:
            found[self.nan_at] = math.nan
        return [rollout(ids, found)]

    def score(self, rollouts, sampling):
        self.calls.append("score")
        result = []
        for one in rollouts:
            before = [PROMPT_IDS[-1], *one.response_ids[:-1]]
            context = context_of(self.trainer, PROMPT_IDS)
            tables = [distribution(next_logits(self.trainer, context, last), sampling) for last in before]
            pairs = zip(tables, one.response_ids, strict=True)
            result.append(np.array([table[i] for table, i in pairs], dtype=np.float32))
        return result

    def event(self, kind, **fields):
        assert kind == "probe_alarm"
        self.events.append(fields)

    def probe(self, *, sampling=RUN, dtype="float32", **config):
        return Probe(
            ProbeConfig(**config),
            dtype=dtype,
            sampling=sampling,
            sample=self.sample,
            score=self.score,
            invalidate_caches=self.invalidate_caches,
            commit_whole=lambda: self.commit(whole=True),
            event=self.event,
        )


def rollout(ids, logprobs):
    return Rollout(
        prompt_id="p",
        sample_index=0,
        prompt_ids=np.array(PROMPT_IDS),
        response_ids=np.array(ids, dtype=np.int64),
        logprobs=np.array(logprobs, dtype=np.float32),
        versions=np.zeros(len(ids), dtype=np.int64),
        finish_reason="length",
        text="",
    )


def after_two_commits(world, **options):
    """Values of the probe after an update and its commit; the first commit was probed too, so the prompt is cached."""
    probe = world.probe(every=1, **options)
    world.commit(whole=True)
    probe.after_commit(0)
    world.update()
    world.commit()
    world.calls.clear()
    world.events.clear()
    return finish(probe.after_commit(1))


def test_a_healthy_engine_costs_one_sample_and_one_pass(caplog):
    world = World()
    values = after_two_commits(world)
    assert values["probe/max_logprob_difference"] < 1e-5
    assert values["probe/mean_logprob_difference"] <= values["probe/max_logprob_difference"]
    assert world.calls == ["sample", "score"]
    assert world.events == []
    assert caplog.records == []


@pytest.mark.parametrize(
    ("fault", "cause", "healed", "calls"),
    [
        ({"keeps_cache": True}, "cache", True, ["invalidate", "sample", "score"]),
        ({"loses_frozen": True}, "weights", True, ["commit whole", "sample", "score"]),
        ({"noise": 0.01}, "numerics", False, ["commit whole", "sample", "score"]),
        ({"nan_at": 2}, "numerics", False, ["commit whole", "sample", "score"]),
    ],
)
def test_each_cause_is_recognised(fault, cause, healed, calls, caplog):
    world = World(**fault)
    values = after_two_commits(world)
    assert values["probe/max_logprob_difference"] > 1e-3
    (event,) = world.events
    assert (event["cause"], event["healed"], event["version"]) == (cause, healed, 1)
    assert event["max_logprob_difference"] == values["probe/max_logprob_difference"]
    assert world.calls[-len(calls) :] == calls
    assert caplog.records[-1].levelno == logging.WARNING
    message = caplog.records[-1].getMessage()
    assert f"Likely cause: {cause}." in message
    assert ("the difference is gone" in message) == healed
    again = world.probe().check(1)
    assert (finish(again)["probe/max_logprob_difference"] < 1e-3) == healed


def test_log_probs_of_another_distribution_are_a_sampling_fault(caplog):
    world = World(raw_logprobs=True)
    after_two_commits(world)
    (event,) = world.events
    assert (event["cause"], event["healed"]) == ("sampling", False)
    assert event["experiments"]["cache"] > 1e-2
    assert event["experiments"]["sampling"] < 1e-5
    assert "commit whole" not in world.calls, "an experiment more than needed"
    assert "They agree at temperature 1" in caplog.text


def test_at_temperature_1_without_filters_sampling_is_no_suspect():
    world = World(noise=0.01)
    after_two_commits(world, sampling=Sampling(max_new_tokens=8))
    assert list(world.events[0]["experiments"]) == ["cache", "weights"]


def test_a_low_temperature_magnifies_what_numerics_do_and_is_not_blamed_for_it(monkeypatch):
    world = World()
    differences = iter([2.2e-3, 2.2e-3, 0.3 * 2.2e-3, 2.2e-3])
    monkeypatch.setattr(
        Probe, "_compare", lambda self, version, sampling: probe_module.Difference((d := next(differences)), d, 1)
    )
    world.probe(sampling=Sampling(temperature=0.3)).check(0)
    assert world.events[0]["cause"] == "numerics"


def test_an_alarm_is_logged_once_a_cause_but_is_an_event_each_time(caplog):
    world = World(noise=0.01)
    probe = world.probe(every=1)
    world.commit(whole=True)
    for version in range(3):
        probe.after_commit(version)
    assert [event["version"] for event in world.events] == [0, 1, 2]
    assert len(caplog.records) == 1
    world.noise, world.raw_logprobs = 0.0, True
    probe.after_commit(3)
    assert len(caplog.records) == 2, "another cause is news"


def test_the_first_commit_and_every_nth_after_it():
    world = World()
    probe = world.probe(every=3)
    due = [bool(probe.after_commit(version)) for version in range(8)]
    assert due == [True, False, False, True, False, False, True, False]


def test_budget_and_seed():
    world = World()
    seen = []
    original = world.sample

    def sample(sampling, key):
        seen.append((sampling, key))
        return original(sampling, key)

    world.sample = sample
    world.commit(whole=True)
    report = world.probe(num_tokens=5).check(7)
    assert report["probe/mean_logprob_difference"].denominator == 5
    assert seen == [(Sampling(temperature=0.7, top_p=0.9, top_k=12, min_p=0.01, max_new_tokens=5), "probe 7")]


def test_tolerance_by_dtype_and_by_config():
    for dtype, config, alarm in (
        ("float32", {}, True),
        ("bfloat16", {}, False),
        ("bfloat16", {"tolerance": 0.1}, True),
    ):
        world = World(noise=0.2)
        world.probe(dtype=dtype, **config).check(0)
        assert bool(world.events) == alarm, (dtype, config)


def test_a_response_of_one_token():
    world = World(length=1)
    assert after_two_commits(world)["probe/max_logprob_difference"] < 1e-5


def test_a_response_of_no_token_is_said_and_not_measured(caplog):
    assert World(length=0).probe().check(0) == {}
    assert "nothing was compared" in caplog.text


def test_nan_is_an_alarm_and_infinite():
    world = World(nan_at=0)
    values = finish(world.probe().check(0))
    assert values["probe/max_logprob_difference"] == math.inf
    assert world.events[0]["cause"] == "numerics"


def test_a_token_that_the_trainer_rules_out_is_an_alarm():
    world = World()
    healthy = world.score
    world.score = lambda rollouts, sampling: [
        np.where(np.arange(len(a)) == 1, -math.inf, a) for a in healthy(rollouts, sampling)
    ]
    world.probe().check(0)
    assert world.events[0]["max_logprob_difference"] == math.inf


def test_experiments_that_nobody_can_make_are_left_out(caplog):
    world = World(noise=0.01)
    probe = Probe(
        ProbeConfig(),
        dtype="float32",
        sampling=Sampling(max_new_tokens=8),
        sample=world.sample,
        score=world.score,
        invalidate_caches=None,
        commit_whole=None,
        event=world.event,
    )
    probe.check(0)
    assert world.events[0]["experiments"] == {}
    assert "none could be made" in caplog.text


def prompt(name, ids):
    return Prompt(name, "s", tuple(ids), tuple(ids), (), None, None, None, {})


def test_the_longest_of_the_first_prompts_is_taken():
    prompts = [
        prompt("a", [1]),
        prompt("b", [1, 2, 3]),
        prompt("c", [3, 2, 1]),
        *[prompt("short", [1])] * 61,
        prompt("late", [1] * 9),
    ]
    assert choose_prompt(prompts).id == "b"


def test_wiring_with_routers_and_a_trainer():
    """Two engines that write bytes uniformly, and a trainer that starts uniform over twice as many tokens."""
    engines = [FakeEngine(lambda request: "abc"), FakeEngine(lambda request: "de")]
    asked = prompt("s/1", [1, 2])
    trainer = FakeTrainer(num_ranks=2, vocabulary=512)
    events = []
    probe = Probe(
        ProbeConfig(num_tokens=4),
        dtype="float32",
        sampling=Sampling(stop_ids=(0,)),
        sample=sampled_by([Router([engine], None, 0).sample for engine in engines], asked),
        score=scored_by(trainer, asked, None),
        invalidate_caches=None,
        commit_whole=None,
        event=lambda kind, **fields: events.append(fields),
    )
    values = finish(probe.check(0))
    assert values["probe/max_logprob_difference"] == pytest.approx(math.log(2), rel=1e-5)
    assert events[0]["num_tokens"] == 7, "both engines: three and two letters, an end each"
    assert {r.sampling.max_new_tokens for engine in engines for call in engine.calls for r in call} == {4}
