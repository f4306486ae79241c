"""Policy loss x advantage x normaliser x place of the KL: legal ones run, illegal ones are refused with the reason."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from skirl.config.algorithms import Advantage, Correction, Normalizer, PolicyLoss
from skirl.config.check import check
from skirl.config.combinations import advantages, combinations, legal, losses, normalizers, render
from skirl.config.formula import loss_formula
from skirl.config.load import load
from skirl.config.method import PRESETS, MethodConfig
from skirl.errors import ConfigError
from skirl.records import Group, Prompt, Rollout, Sampling, Score, ScoredGroup
from skirl.step import Method
from skirl.step.advantages import BY_RESPONSE, BY_TOKEN
from skirl.step.corrections import CORRECTIONS, SELECTIONS
from skirl.testing.fake_trainer import FakeTrainer
from skirl.training.objective import PolicyObjective, micro_batch_loss
from skirl.training.policy_losses import POLICY_LOSSES
from skirl.training.rows import make_row

ROOT = Path(__file__).parents[2]


def kinds(union):
    from typing import get_args

    return {get_args(model.model_fields["kind"].annotation)[0] for model in get_args(get_args(union)[0])}


def test_every_kind_of_the_schema_has_its_function():
    assert kinds(Advantage) == BY_TOKEN.keys() | BY_RESPONSE.keys()
    assert kinds(PolicyLoss) == POLICY_LOSSES.keys()
    assert kinds(Correction) == CORRECTIONS.keys()
    assert kinds(PolicyLoss) >= SELECTIONS.keys()
    assert kinds(Normalizer) == {"token", "sequence", "constant"}


def test_the_table_has_every_combination_once():
    found = [
        (repr(loss), repr(advantage), normalizer.kind, kl) for loss, advantage, normalizer, kl, _ in combinations()
    ]
    assert len(found) == len(set(found)) == len(losses()) * len(advantages()) * len(normalizers()) * 3


def test_what_is_refused_and_what_is_not():
    refused = Counter((loss.kind, getattr(loss, "token_level", None)) for loss, *_, reason in combinations() if reason)
    always = 3 * 3  # max_rl, pass_at_k and gdpo with the KL in the reward, three normalisers
    for name in ("ppo_clip", "cispo", "sapo", "clip_cov", "kl_cov", "dppo"):
        assert refused[name, None] == always, name
    assert refused["gspo", True] == always
    for loss, advantage, normalizer, kl, reason in combinations():
        whole = loss.kind == "gmpo" or (loss.kind == "gspo" and not loss.token_level)
        if whole and normalizer.kind != "sequence":
            assert reason is not None
            assert "use the sequence normaliser" in reason
        by_token = advantage.kind == "gae" or getattr(advantage, "gamma", 1) < 1
        by_token |= kl == "reward" and advantage.kind in ("reinforce", "reinforce_pp")
        if (whole or loss.kind == "topr") and by_token:
            assert reason is not None


def config(tmp_path, loss, advantage, normalizer, kl):
    estimator = "k1" if kl == "reward" else "k3"
    method = {
        "advantage": advantage.model_dump(),
        "policy_loss": loss.model_dump(),
        "normalizer": normalizer.model_dump(),
        "kl": None if kl == "none" else {"where": kl, "estimator": estimator},
    }
    return method


def test_check_refuses_exactly_the_illegal_ones(tmp_path):
    import yaml

    recipe = tmp_path / "x.yaml"
    base = {
        "model": {"path": "m"},
        "data": {"train": {"a": {"path": "a"}}},
        "run": {"dir": "r"},
        "reward": {"terms": {"a": "accuracy"}},
        "train": {},
    }
    recipe.write_text(yaml.safe_dump(base))
    template = load(recipe, []).config
    for number, (loss, advantage, normalizer, kl, reason) in enumerate(combinations()):
        if number % 7 and reason is None:
            continue  # a seventh of the legal ones, all illegal ones
        method = MethodConfig.model_validate(config(tmp_path, loss, advantage, normalizer, kl))
        whole = template.model_copy(update={"method": method})
        if reason is None:
            check(whole, "train")
            continue
        with pytest.raises(ConfigError) as caught:
            check(whole, "train")
        assert reason in str(caught.value)


def groups():
    """Two groups of three, 1 to 4 tokens each, one of them with none."""
    made, random = [], np.random.default_rng(0)
    for name, lengths in (("a", (1, 4, 2)), ("b", (3, 0, 2))):
        rollouts = tuple(
            Rollout(
                name,
                i,
                np.array([1, 2]),
                random.integers(3, 60, n),
                np.log(random.uniform(0.01, 0.9, n)).astype(np.float32),
                np.zeros(n, np.int64),
                "stop",
                "",
            )
            for i, n in enumerate(lengths)
        )
        prompt = Prompt(name, "s", (1, 2), (1, 2), (), None, None, None, {})
        scores = tuple(Score(t, {"x": t, "y": 1.0 - t * t}) for t in (0.0, 1.0, 0.5))
        made.append(ScoredGroup(Group(prompt, rollouts, Sampling()), scores))
    return made


def test_every_legal_combination_gives_a_finite_loss_and_gradient_through_the_real_parts(tmp_path):
    """Method and objective together, over every combination; for some also over 7 ranks, with the same value."""
    sampled, count = groups(), 0
    for loss, advantage, normalizer, kl, reason in combinations():
        if reason is not None:
            continue
        settings = MethodConfig.model_validate(
            {**config(tmp_path, loss, advantage, normalizer, kl), "epochs": 2, "correction": "tis"}
        )
        method = Method(settings, placeholder_id=None, max_scoring_tokens=50)
        batch = method.prepare(sampled, FakeTrainer(vocabulary=64))
        objective = PolicyObjective(Sampling(), settings.policy_loss, entropy_coef=0.01)
        totals = []
        for ranks in (1, 7) if count % 10 == 0 else (1,):  # 7 ranks for 6 sequences: a dummy
            plan = method.plan(batch, num_ranks=ranks, max_tokens=40)
            total, steepest = 0.0, 0.0
            for micro_batch in (m for rank in plan.steps[0].ranks for m in rank):
                row, streams = make_row(plan, micro_batch, torch.device("cpu"))
                logprobs = (-3.0 - 0.01 * row.targets.float()).requires_grad_()
                value, _ = micro_batch_loss(objective, (logprobs, -logprobs, torch.empty(0)), streams)
                value.backward()
                total += float(value.detach())
                steepest = max(steepest, float(logprobs.grad.abs().sum()))
                assert torch.isfinite(logprobs.grad).all()
            assert np.isfinite(total)
            assert steepest > 0
            totals.append(total)
        assert totals[0] == pytest.approx(totals[-1], rel=1e-5, abs=1e-6)
        count += 1
    assert count == sum(reason is None for *_, reason in combinations())


# ----------------------------------------------------------------------------------------------------- words about them
@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_legal(preset):
    method = MethodConfig.model_validate({"preset": preset})
    kl = "none" if method.kl is None else method.kl.where
    assert legal(method.policy_loss, method.advantage, method.normalizer, kl) is None


def test_the_page_is_up_to_date():
    assert (ROOT / "docs" / "methods.md").read_text(encoding="utf-8") == render(), "run `make docs`"


def test_every_variant_has_its_formula(tmp_path):
    (tmp_path / "x.yaml").write_text(
        "model: {path: m}\ndata: {train: {a: {path: a}}}\nrun: {dir: r}\nreward: {terms: {a: accuracy}}\ntrain: {}\n"
    )
    template, texts = load(tmp_path / "x.yaml", []).config, set()
    for loss, advantage, normalizer, kl, reason in combinations():
        if reason is None:
            method = MethodConfig.model_validate(config(tmp_path, loss, advantage, normalizer, kl))
            lines = [line for line, _ in loss_formula(template.model_copy(update={"method": method}))]
            assert all(len(line) <= 120 for line in lines), max(lines, key=len)
            texts.add("\n".join(lines))
    assert len(texts) == sum(reason is None for *_, reason in combinations()), "each says what it is"
