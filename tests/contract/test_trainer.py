"""What every Trainer promises: local workers with the single backend, with and without a critic, and the fake."""

from dataclasses import replace

import numpy as np
import pytest

from skirl.assemble_worker import build_worker
from skirl.config.schema import Config
from skirl.errors import TrainingDiverged
from skirl.planning.schedule import make_plan
from skirl.protocols import Trainer, WeightCommit
from skirl.records import UpdateReport
from skirl.runtime.local import LocalWorkers
from skirl.runtime.worker import WorkerSpec
from skirl.testing.fake_trainer import FakeTrainer
from skirl.training.objective import PolicyObjective
from skirl.training.value_objective import ValueObjective
from tests import tiny

LENGTHS = (4, 1, 6, 3, 2)
MAX_TOKENS = 100


def local(checkpoints, name, ranks):
    return tiny.make_workers(checkpoints[name], PolicyObjective(tiny.Sampling()), num_ranks=ranks)


def with_critic(checkpoints, name, ranks):
    config = Config.model_validate(
        {
            "model": {"path": checkpoints[name]},
            "data": {},
            "run": {"dir": "unused"},
            "method": {"preset": "ppo"},
            "critic": {"optim": {"lr": 1e-2}},
            "trainer": {"ranks": ranks, "optim": {"lr": 1e-3}},
        }
    )
    objectives = {"objective": PolicyObjective(tiny.Sampling()), "critic_objective": ValueObjective(clip=0.2)}
    spec = WorkerSpec(config, total_prompts=100, with_reference=True, **objectives)
    return LocalWorkers(build_worker(spec), num_ranks=ranks, batch_size=8)


MAKERS = {
    "text": lambda checkpoints: local(checkpoints, "tied", 1),
    "text, 2 ranks": lambda checkpoints: local(checkpoints, "untied", 2),
    "speech": lambda checkpoints: local(checkpoints, "native", 1),
    "fake": lambda checkpoints: FakeTrainer(),
    "fake, 2 ranks": lambda checkpoints: FakeTrainer(num_ranks=2),
}
CRITICS = {
    "text and critic": lambda checkpoints: with_critic(checkpoints, "untied", 1),
    "speech and critic, 2 ranks": lambda checkpoints: with_critic(checkpoints, "native", 2),
    "fake, 2 ranks": MAKERS["fake, 2 ranks"],
}


@pytest.fixture(params=MAKERS)
def make(request, checkpoints):
    """Builds equal trainers."""
    return lambda: (MAKERS | CRITICS)[request.param](checkpoints)


@pytest.fixture
def trainer(make):
    return make()


@pytest.fixture(scope="module")
def kits(checkpoints):
    return {name: tiny.make_kit(checkpoints[name]) for name in ("tied", "native")}


@pytest.fixture
def batch(request, kits):
    is_speech = "speech" in request.node.callspec.id
    return [replace(s, old_logprobs=None) for s in tiny.sequences(kits["native" if is_speech else "tied"], LENGTHS)]


def plan_of(trainer, batch, **settings):
    return make_plan(batch, num_ranks=trainer.num_ranks, max_tokens=MAX_TOKENS, normalizer="sequence", **settings)


def with_returns(trainer, batch):
    """The batch with the critic's values, and returns far from them."""
    found = trainer.values(plan_of(trainer, batch))
    return [
        replace(s, values=v, returns=np.linspace(0.5, 1.0, s.num_actions)) for s, v in zip(batch, found, strict=True)
    ]


def values(trainer, batch, role="policy"):
    return np.concatenate([np.asarray(x) for x in trainer.logprobs(plan_of(trainer, batch), role)])


def test_it_is_a_trainer_and_commits(trainer):
    assert isinstance(trainer, Trainer)
    assert isinstance(trainer, WeightCommit)
    trainer.commit(0)


def test_logprobs_come_by_sequence_whatever_the_packing(trainer, batch):
    found = trainer.logprobs(plan_of(trainer, batch), "policy")
    assert [x.shape for x in found] == [(n,) for n in LENGTHS]
    assert {np.asarray(x).dtype for x in found} == {np.dtype(np.float32)}
    assert all((np.asarray(x) < 0).all() for x in found)
    backwards = trainer.logprobs(plan_of(trainer, batch[::-1]), "policy")[::-1]
    for one, other in zip(found, backwards, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


def test_an_update_moves_the_policy_towards_what_was_good(trainer, batch):
    batch = [replace(s, advantages=np.full(s.num_actions, 1.0 if i == 0 else 0.0)) for i, s in enumerate(batch)]
    before = trainer.logprobs(plan_of(trainer, batch), "policy")[0].sum()
    reference = values(trainer, batch, "reference")
    np.testing.assert_allclose(values(trainer, batch), reference, rtol=0, atol=1e-6)
    for _ in range(3):
        trainer.update(plan_of(trainer, batch), 5)
    assert trainer.logprobs(plan_of(trainer, batch), "policy")[0].sum() > before + 0.05
    assert values(trainer, batch, "reference").tobytes() == reference.tobytes()


def test_report_of_an_update(trainer, batch):
    for version in (1, 2):
        report = trainer.update(plan_of(trainer, batch, mini_batches=2), 5 * version)
        assert isinstance(report, UpdateReport)
        assert report.policy_version == version == trainer.policy_version()
        assert len(report.losses) == len(report.grad_norms) == len(report.learning_rates) == 2
        assert all(np.isfinite(report.losses))
        assert min(report.grad_norms) > 0
        assert min(report.learning_rates) > 0
        assert report.seconds > 0
        assert {m.denominator for m in report.metrics.values()} == {float(sum(LENGTHS))}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_raises_and_changes_nothing(trainer, batch, bad, tmp_path):
    trainer.update(plan_of(trainer, batch), 5)
    before = values(trainer, batch)
    advantages = batch[2].advantages.copy()
    advantages[-1] = bad
    poisoned = [*batch[:2], replace(batch[2], advantages=advantages), *batch[3:]]
    with pytest.raises(TrainingDiverged, match="step 0 after version 1"):
        trainer.update(plan_of(trainer, poisoned), 10)
    assert values(trainer, batch).tobytes() == before.tobytes()
    assert trainer.policy_version() == 1
    trainer.update(plan_of(trainer, batch), 10)


def test_what_is_loaded_goes_on_bit_for_bit(make, batch, tmp_path):
    first, second = make(), make()
    first.update(plan_of(first, batch), 5)
    first.save(tmp_path)
    wanted = [first.update(plan_of(first, batch), 5 * n).losses for n in (2, 3)]
    second.load(tmp_path)
    assert second.policy_version() == 1
    assert [second.update(plan_of(second, batch), 5 * n).losses for n in (2, 3)] == wanted
    assert values(second, batch).tobytes() == values(first, batch).tobytes()


# --------------------------------------------------------------------------------------------------------------- critic
@pytest.mark.parametrize("make", CRITICS, indirect=True)
def test_values_are_one_an_action_token(trainer, batch):
    found = trainer.values(plan_of(trainer, batch))
    assert [np.asarray(x).shape for x in found] == [(n,) for n in LENGTHS]
    assert {np.asarray(x).dtype for x in found} == {np.dtype(np.float32)}


@pytest.mark.parametrize("make", CRITICS, indirect=True)
def test_the_critic_alone_learns_its_returns_and_leaves_the_policy(trainer, batch):
    before = values(trainer, batch)
    losses = []
    for n in range(8):
        report = trainer.update(plan_of(trainer, with_returns(trainer, batch)), 5 * n + 5, ("critic",))
        losses.append(report.metrics["critic/loss"].value)
        assert report.losses == report.grad_norms == report.learning_rates == ()
        assert report.policy_version == trainer.policy_version() == 0
    assert losses[-1] < 0.7 * losses[0]
    assert values(trainer, batch).tobytes() == before.tobytes()


@pytest.mark.parametrize("make", CRITICS, indirect=True)
def test_both_roles_are_what_each_is_alone(make, batch):
    """The critic shares the plan and nothing else: neither sees the other."""
    together, apart = make(), make()
    plan = plan_of(together, with_returns(together, batch))
    both = together.update(plan, 5, ("policy", "critic"))
    policy, critic = apart.update(plan, 5), apart.update(plan, 5, ("critic",))
    assert both.losses == policy.losses
    assert both.policy_version == 1
    assert dict(both.metrics) == {**policy.metrics, **critic.metrics}
    assert values(together, batch).tobytes() == values(apart, batch).tobytes()
    for one, other in zip(together.values(plan), apart.values(plan), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    np.testing.assert_raises(AssertionError, np.testing.assert_array_equal, one, with_returns(make(), batch)[-1].values)


@pytest.mark.parametrize("make", CRITICS, indirect=True)
def test_a_critic_that_is_loaded_goes_on_bit_for_bit(make, batch, tmp_path):
    first, second = make(), make()
    plan = plan_of(first, with_returns(first, batch))
    first.update(plan, 5, ("policy", "critic"))
    first.save(tmp_path)
    second.load(tmp_path)
    for n in (10, 15):
        wanted, got = (trainer.update(plan, n, ("policy", "critic")) for trainer in (first, second))
        assert wanted.losses == got.losses
        assert wanted.metrics == got.metrics
    for one, other in zip(first.values(plan), second.values(plan), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def test_evaluation_is_the_loss_without_a_step(trainer, batch):
    plan = plan_of(trainer, batch)
    before, found = values(trainer, batch), trainer.evaluate(plan)
    assert values(trainer, batch).tobytes() == before.tobytes()
    assert trainer.policy_version() == 0
    assert found["loss"].denominator == 1
    assert found["loss"].value == pytest.approx(trainer.update(plan, 5).losses[0], abs=1e-6)


def test_export_writes_files(trainer, tmp_path):
    trainer.export(tmp_path / "export")
    assert [f for f in (tmp_path / "export").iterdir() if f.stat().st_size]
