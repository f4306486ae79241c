"""From scored groups to advantages, as ``Method.prepare`` does it, against the papers' definitions one step at a time.

random groups (siblings lost, turns, cut off, parts missing) -> log-probs and values of a fake trainer -> shaping -> KL
in the reward -> advantages and returns -> whitening over the batch; and corrections beside it. All in float64.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from skirl.config import combinations
from skirl.config.method import MethodConfig
from skirl.records import Group, Plan, Prompt, Ratio, Role, Rollout, Sampling, Score, ScoredGroup
from skirl.step import Method
from skirl.testing.fake_trainer import FakeTrainer
from tests.oracles import advantages as oracle
from tests.oracles import corrections as correction_oracle
from tests.oracles import kl as kl_oracle
from tests.oracles import shaping as shaping_oracle
from tests.oracles.tally import Tally

ROUNDS = 12
"""Batches for every combination; raise it for a longer search."""
BOUND = 1e-9
BUDGET = 8
"""max_new_tokens."""

ADVANTAGES: dict[str, dict[str, Any]] = {
    "gae": {"kind": "gae", "gamma": 0.9, "lam": 0.8, "whiten": False},
    "gae whitened": {"kind": "gae"},
    "reinforce": {"kind": "reinforce"},
    "reinforce discounted": {"kind": "reinforce", "gamma": 0.9},
    "reinforce_pp": {"kind": "reinforce_pp"},
    "reinforce_pp_baseline": {"kind": "reinforce_pp_baseline"},
    "leave_one_out": {"kind": "leave_one_out"},
    "group_norm": {"kind": "group_norm"},
    "group_norm population": {"kind": "group_norm", "ddof": 0, "eps": 1e-4},
    "group_mean": {"kind": "group_mean"},
    "max_rl": {"kind": "max_rl"},
    "pass_at_k": {"kind": "pass_at_k", "k": 2},
    "opo": {"kind": "opo"},
    "gdpo": {"kind": "gdpo", "weights": {"x": 0.5, "y": 2.0}},
}
BY_TOKEN = ("gae", "reinforce", "reinforce_pp")
PLACES = [None, ("loss", "k3"), ("reward", "k1"), ("reward", "k2"), ("reward", "k3")]
SHAPINGS: list[dict[str, Any]] = [
    {},
    {"clip_range": (0.1, 0.8), "overlong": {"buffer_share": 0.5, "penalty": 0.7}},
    {"truncation": {"factor": 0.5}, "length": {"coef": 0.3, "threshold": 0.4}},
    {"clip_range": (0.0, 1.0), "truncation": {"score": 0.05}, "overlong": {}, "length": {}},
]


class Answers(FakeTrainer):
    """Log-probs and values of each sequence of its own, by its id; nothing is trained."""

    def logprobs(self, plan: Plan, role: Role, sampling: Sampling | None = None) -> list[np.ndarray]:
        """As ``answers``."""
        return [answers(role, s.id, s.num_actions) for s in plan.sequences]

    def values(self, plan: Plan) -> list[np.ndarray]:
        """As ``answers``."""
        return [answers("critic", s.id, s.num_actions) for s in plan.sequences]


def answers(role: str, name: str, size: int) -> np.ndarray:
    """[T] float32."""
    random = np.random.default_rng(list(f"{role} {name}".encode()))
    if role == "critic":
        return random.standard_normal(size).astype(np.float32)
    shift = {"policy": 0.0, "rollout": 0.05, "reference": 0.5}[role]
    token = np.random.default_rng(list(name.encode())).uniform(-4, -1, size=size)
    return (token + shift * random.standard_normal(size)).astype(np.float32)


def groups_of(random: np.random.Generator, *, turns: bool) -> list[ScoredGroup]:
    """1 to 4 groups of 1 to 5 siblings of 0 to 8 tokens: ties, all equal, parts that a group or a sample lacks."""
    found = []
    for g in range(int(random.integers(1, 5))):
        name, kind = f"p{g}", random.random()
        prompt = Prompt(name, "made", (1, 2), (1, 2), (), None, None, None, {})
        rollouts, scores = [], []
        for index in range(int(random.integers(1, 6))):
            size = int(random.integers(0 if random.random() < 0.2 else 1, BUDGET + 1))
            total = 0.5 if kind < 0.2 else float(random.integers(2)) if kind < 0.5 else float(random.uniform(0, 1))
            parts = {n: float(random.standard_normal()) for n in ("x", "y", "z") if random.random() < 0.9}
            ends, worths = (), ()
            if turns and size >= 2:
                ends = (int(random.integers(1, size)), size)
                worths = (float(random.standard_normal()), 0.0)
                worths = (worths[0], total - worths[0])
            rollouts.append(
                Rollout(
                    prompt_id=name,
                    sample_index=2 * index,  # siblings were lost
                    prompt_ids=np.array([1, 2]),
                    response_ids=np.arange(size),
                    logprobs=answers("rollout", f"{name}#{2 * index}", size),
                    versions=np.zeros(size, dtype=np.int64),
                    finish_reason="length" if size == BUDGET else "stop",
                    text="",
                    turn_ends=ends,
                )
            )
            scores.append(Score(total, parts, turns=worths))
        found.append(ScoredGroup(Group(prompt, tuple(rollouts), Sampling(max_new_tokens=BUDGET)), tuple(scores)))
    return found


# --------------------------------------------------------------------------------------------------------- the oracle's
@dataclass
class Expected:
    """Of the whole batch, in order: advantages and returns of each response, [] where there are none."""

    advantages: list[list[float]]
    returns: list[list[float]]


def totals(group: ScoredGroup) -> list[float]:
    return [s.total for s in group.scores if s.total is not None]


def shaped(group: ScoredGroup, how: dict[str, Any]) -> list[float]:
    """Scores before any baseline: clip range, truncation, overlong, length, in this order."""
    raw = totals(group)
    sizes = [len(r.response_ids) for r in group.group.rollouts]
    scores = list(raw)
    if "clip_range" in how:
        scores = shaping_oracle.clip_scores(scores, *how["clip_range"])
    if "truncation" in how:
        cut = [r.finish_reason == "length" for r in group.group.rollouts]
        given = how["truncation"]
        scores = shaping_oracle.truncated_scores(scores, cut, given.get("factor"), given.get("score"))
    if "overlong" in how:
        buffer = round(how["overlong"].get("buffer_share", 0.2) * BUDGET)
        less = shaping_oracle.overlong_penalty(sizes, BUDGET, buffer, how["overlong"].get("penalty", 1.0))
        scores = [a + b for a, b in zip(scores, less, strict=True)]
    if "length" in how:
        right = [x >= how["length"].get("threshold", 0.5) for x in raw]
        more = shaping_oracle.length_reward(sizes, right, how["length"].get("coef", 1.0))
        scores = [a + b for a, b in zip(scores, more, strict=True)]
    return scores


def penalties(rollout: Rollout, kl: tuple[str, str] | None, coef: float, *, scored: bool) -> list[float]:
    """beta k(policy when sampled, reference) of each token, where the KL is in the reward."""
    size = len(rollout.response_ids)
    if kl is None or kl[0] == "loss":
        return [0.0] * size
    name = f"{rollout.prompt_id}#{rollout.sample_index}"
    policy = answers("policy" if scored else "rollout", name, size)
    reference = answers("reference", name, size)
    return [coef * kl_oracle.ESTIMATORS[kl[1]](float(p), float(q))[0] for p, q in zip(policy, reference, strict=True)]


def rewards_of(score: Score, rollout: Rollout, worth: float, less: list[float]) -> list[float]:
    """The turns' values where the turns end, what shaping changed (or all) at the last token, minus the penalties."""
    rewards = [-x for x in less]
    if rewards:
        for end, value in zip(rollout.turn_ends, score.turns, strict=bool(score.turns)):
            rewards[end - 1] += value
        rewards[-1] += worth - sum(score.turns)
    return rewards


def of_responses(name: str, how: dict[str, Any], group: ScoredGroup, scores: list[float]) -> list[float]:
    """One number for each response of a group; ``scores`` without the penalties."""
    kind, same = how["kind"], {"tolerance": 1e-8}
    if kind in ("reinforce_pp_baseline", "group_mean"):
        return oracle.group_mean(scores, **same)
    if kind == "leave_one_out":
        return oracle.leave_one_out(scores, **same)
    if kind == "group_norm":
        return oracle.group_norm(scores, eps=how.get("eps", 1e-6), ddof=how.get("ddof", 1), **same)
    if kind == "max_rl":
        return oracle.max_rl(scores, **same)
    if kind == "pass_at_k":
        right = [x >= 0.5 for x in scores]
        return oracle.pass_at_k(right, k=how["k"]) if len(right) > how["k"] else [0.0] * len(right)
    if kind == "opo":
        return oracle.optimal_baseline(scores, [len(r.response_ids) for r in group.group.rollouts], **same)
    names = [n for n in ("x", "y", "z") if all(n in s.parts for s in group.scores)]
    rows = [[s.parts[n] for n in names] for s in group.scores]
    weights = [how["weights"].get(n, 1.0) for n in names]
    return oracle.decoupled_norm(rows, weights, eps=1e-6, ddof=1, **same)


def expected_of(groups: list[ScoredGroup], how: dict[str, Any], shape: dict[str, Any], kl: Any) -> Expected:
    found, targets = [], []
    for group in groups:
        worths = shaped(group, shape)
        less = [penalties(r, kl, 0.3, scored=False) for r in group.group.rollouts]
        if how["kind"] not in BY_TOKEN:
            scores = [w - math.fsum(p) for w, p in zip(worths, less, strict=True)]
            found += [[a] for a in of_responses(how["kind"], how, group, scores)]
            continue
        for score, rollout, worth, minus in zip(group.scores, group.group.rollouts, worths, less, strict=True):
            rewards = rewards_of(score, rollout, worth, minus)
            if how["kind"] == "gae":
                values = answers("critic", f"{rollout.prompt_id}#{rollout.sample_index}", len(rewards))
                pair = oracle.gae(
                    rewards, [float(v) for v in values], gamma=how.get("gamma", 1.0), lam=how.get("lam", 0.95)
                )
                found.append(pair[0])
                targets.append(pair[1])
            else:
                found.append(oracle.discounted_returns(rewards, gamma=how.get("gamma", 1.0)))
    if how["kind"] == "gdpo":
        found = [[a] for a in oracle.whiten_scores([a for (a,) in found], eps=1e-6, ddof=1)]
    if how["kind"] not in BY_TOKEN:
        rollouts = [r for g in groups for r in g.group.rollouts]
        found = [a * len(r.response_ids) for a, r in zip(found, rollouts, strict=True)]
    if how["kind"].startswith("reinforce_pp") or (how["kind"] == "gae" and how.get("whiten", True)):
        white = iter(oracle.whiten([a for one in found for a in one], eps=1e-8))
        found = [[next(white) for _ in one] for one in found]
    return Expected(found, targets)


# ---------------------------------------------------------------------------------------------------------------- tests
def numbers(stream: np.ndarray | None) -> list[float]:
    assert stream is not None
    return stream.tolist()


def config_of(how: dict[str, Any], shape: dict[str, Any], kl: Any, **more: Any) -> MethodConfig:
    penalty = None if kl is None else {"where": kl[0], "estimator": kl[1], "coef": 0.3}
    return MethodConfig.model_validate({"advantage": how, "shaping": shape, "kl": penalty, **more})


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_and_returns(name, record_property):
    """Every advantage with every place and estimator of the KL that goes with it, every shaping, turns or none."""
    found, how = Tally(f"method {name}"), ADVANTAGES[name]
    for number, kl in enumerate(PLACES):
        advantage = config_of(how, {}, None).advantage
        if combinations.kl_problem(advantage, "none" if kl is None else kl[0]) is not None:
            continue
        for seed in range(ROUNDS):
            random = np.random.default_rng((list(ADVANTAGES).index(name), number, seed))
            shape = SHAPINGS[0 if name == "max_rl" else seed % len(SHAPINGS)]  # max_rl needs scores >= 0
            groups = groups_of(random, turns=how["kind"] in BY_TOKEN and seed % 2 == 1)
            if not any(len(r.response_ids) for g in groups for r in g.group.rollouts):
                found.skipped += 1
                continue
            method = Method(config_of(how, shape, kl), placeholder_id=None, max_scoring_tokens=64)
            batch = method.prepare(groups, Answers())
            expected = expected_of(groups, how, shape, kl)
            found.cases += 1
            got = [a for s in batch.sequences for a in numbers(s.advantages)]
            wanted = [a for one in expected.advantages for a in one]
            found.add(got, wanted, f"advantages of round {seed}, kl {kl}", floor=1e-3)
            returns = [] if expected.returns == [] else [x for s in batch.sequences for x in numbers(s.returns)]
            found.add(returns, [x for one in expected.returns for x in one], f"returns of round {seed}, kl {kl}")
            assert batch.group_of == tuple(g.group.prompt.id for g in groups for _ in g.scores)
            check_kl(batch.kl, groups, measured=kl is not None)
    found.finish(record_property, BOUND, at_least=ROUNDS)


def check_kl(got: Ratio | None, groups: list[ScoredGroup], *, measured: bool) -> None:
    """k1 summed over all tokens, a response: what the controller is fed with."""
    if not measured:
        assert got is None
        return
    rollouts = [r for g in groups for r in g.group.rollouts]
    total = math.fsum(x for r in rollouts for x in penalties(r, ("reward", "k1"), 1.0, scored=False))
    assert got is not None
    assert got.numerator == pytest.approx(total, abs=1e-9)
    assert got.denominator == len(rollouts)


@pytest.mark.parametrize(
    "how",
    [
        {"kind": "tis", "low": 0.9, "high": 1.1},
        {"kind": "icepop", "low": 0.9, "high": 1.1},
        {"kind": "sequence_mask", "low": 0.97, "high": 1.03, "cap": 1.05},
        {"kind": "sequence_is", "cap": 1.1},
    ],
    ids=lambda how: how["kind"],
)
def test_corrections_of_a_batch(how, record_property):
    """w = the trainer's old policy over the engine's, from the two log-probs; the penalties take the trainer's."""
    found = Tally(f"method {how['kind']}")
    settings = {key: value for key, value in how.items() if key != "kind"}
    for seed in range(3 * ROUNDS):
        random = np.random.default_rng((100, seed))
        groups = groups_of(random, turns=False)
        kl = ("reward", "k1")
        config = config_of({"kind": "reinforce"}, {}, kl, correction=how)
        batch = Method(config, placeholder_id=None, max_scoring_tokens=64).prepare(groups, Answers())
        weight, cut, tokens = 0.0, 0, 0
        rollouts = [x for g in groups for x in zip(g.scores, g.group.rollouts, totals(g), strict=True)]
        for sequence, (score, rollout, worth) in zip(batch.sequences, rollouts, strict=True):
            size = sequence.num_actions
            names = [answers(role, sequence.id, size) for role in ("policy", "rollout")]
            gap = [float(a) - float(b) for a, b in zip(*names, strict=True)]
            factors, is_cut = getattr(correction_oracle, how["kind"])(gap, **settings)  # getattr: a table
            found.add(numbers(sequence.corrections), factors, f"{sequence.id} of round {seed}")
            weight, cut, tokens = weight + math.fsum(map(math.exp, gap)), cut + sum(is_cut), tokens + size
            less = penalties(rollout, kl, 0.3, scored=True)
            rewards = rewards_of(score, rollout, worth, less)
            wanted = oracle.discounted_returns(rewards, gamma=1.0)
            found.add(numbers(sequence.advantages), wanted, f"advantages of round {seed}", floor=1e-3)
        found.cases += 1
        means = batch.metrics["correction/weight_mean"], batch.metrics["correction/cut_fraction"]
        assert [m.denominator for m in means] == [tokens, tokens]
        assert means[0].numerator == pytest.approx(weight, rel=1e-12, abs=1e-12)
        assert means[1].numerator == cut
    found.finish(record_property, BOUND)
