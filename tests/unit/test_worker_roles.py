"""What a process holds and trains by its spec: critics, references, value models, teachers, reward models."""

import json
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from skirl.assemble_worker import build_worker
from skirl.config.offline import RMConfig
from skirl.config.schema import Config, RayRuntimeConfig
from skirl.errors import CheckpointError, ConfigError
from skirl.models.checkpoints import read_json
from skirl.models.loading import load_model
from skirl.models.scalar_heads import MEAN, STD
from skirl.models.value import load_value_model
from skirl.planning.schedule import make_plan
from skirl.records import Preference, Ratio, RewardText, ScoreFailure, UpdateReport
from skirl.runtime.local import LocalWorkers
from skirl.runtime.worker import Worker, WorkerSpec
from skirl.runtime.workers import merge_updates
from skirl.step import score_one
from skirl.training.objective import DistillationObjective, PolicyObjective, SupervisedObjective
from skirl.training.preference_objective import RewardModelObjective
from skirl.training.value_objective import StepRewardObjective, ValueObjective
from tests import tiny

LENGTHS = (4, 1, 6)
BOTH = ("policy", "critic")
LORA = {"rank": 4, "alpha": 64.0}


def test_a_reward_model_that_fails_on_some_texts_costs_these_and_not_the_run() -> None:
    """Out of memory, on whatever runtime: what crosses Ray as the failure of a rank would end the run."""

    class Judge:
        def scores(self, texts: Any) -> list[Any]:
            raise torch.OutOfMemoryError("CUDA out of memory")

    worker = Worker("", reward_models={"judge": Judge()})
    texts = [RewardText((), "a"), RewardText((), "b")]
    found = worker.reward_scores("judge", texts)
    assert [(one.kind, one.message) for one in found if isinstance(one, ScoreFailure)] == [
        ("raised", "OutOfMemoryError: CUDA out of memory")
    ] * 2
    with pytest.raises(KeyError):
        worker.reward_scores("another", texts)


def recipe(path, *, model=None, **sections: Any) -> Config:
    base: dict[str, Any] = {
        "model": {"path": path, **(model or {})},
        "data": {},
        "run": {"dir": "unused"},
        "method": {"preset": "ppo"},
        "critic": {"optim": {"lr": 2e-3}},
        "trainer": {"optim": {"lr": 1e-3}},
    }
    return Config.model_validate(base | sections)


def local(config: Config, objective: Any = None, *, with_reference: bool = False, **spec: Any) -> LocalWorkers:
    made = WorkerSpec(config, objective or PolicyObjective(tiny.Sampling()), 100, with_reference=with_reference, **spec)
    return LocalWorkers(build_worker(made), num_ranks=1, batch_size=8)


def ppo(path, **changes: Any) -> LocalWorkers:
    return local(recipe(path, **changes), critic_objective=ValueObjective(clip=None), with_reference=True)


def batch(path, **streams: Any):
    made = [replace(s, old_logprobs=None) for s in tiny.sequences(tiny.make_kit(path), LENGTHS)]
    zeros = [np.zeros(s.num_actions, dtype=np.float32) for s in made]
    returns = [np.linspace(0.5, 1.0, s.num_actions) for s in made]
    return [replace(s, values=v, returns=r, **streams) for s, v, r in zip(made, zeros, returns, strict=True)]


def weights(directory):
    return load_file(directory / "model.safetensors")


# --------------------------------------------------------------------------------------------------------------- critic
def test_a_critic_starts_at_zero_and_is_exported_as_a_value_model(checkpoints, tmp_path):
    path = checkpoints["untied"]
    workers, plan = ppo(path), tiny.whole(batch(path))
    assert all((v == 0).all() for v in workers.values(plan))
    report = workers.update(plan, 5, BOTH)
    assert report.metrics["critic/lr"] == Ratio(2e-3, 1)
    assert report.metrics["critic/grad_norm"].value > 0
    assert report.learning_rates == (1e-3,)
    before = workers.values(plan)
    workers.export(tmp_path / "critic", "critic")
    assert read_json(tmp_path / "critic/config.json")["architectures"] == ["Qwen3ForTokenClassification"]
    again = ppo(path, critic={"path": tmp_path / "critic"})
    for one, other in zip(before, again.values(plan), strict=True):
        np.testing.assert_array_equal(one, other)
    assert max(np.abs(v).max() for v in before) > 1e-3


def test_a_critic_reads_the_state_before_each_token(checkpoints):
    path = checkpoints["untied"]
    workers, plan = ppo(path), tiny.whole(batch(path))
    for n in (1, 2):
        workers.update(plan, n, ("critic",))
    one = plan.sequences[0]
    other = replace(one, input_ids=one.input_ids.copy())
    other.input_ids[one.action_positions[1]] += 1
    values, changed = (workers.values(tiny.whole([s]))[0] for s in (one, other))
    np.testing.assert_array_equal(changed[:2], values[:2])
    assert np.abs(changed[2:] - values[2:]).min() > 0


def test_policy_and_critic_give_their_memory_back(checkpoints):
    path = checkpoints["small"]
    workers, plan = ppo(path, trainer={"offload": {}}), tiny.whole(batch(path))
    workers.update(plan, 1, BOTH)
    workers._worker.give_back()
    for role in BOTH:
        with pytest.raises(AssertionError, match="was given back"):
            workers.update(plan, 2, (role,))
    workers._worker.take_back()
    assert workers.update(plan, 2, BOTH).policy_version == 2


def test_a_critic_has_its_own_checkpoint_and_keeps_the_policy_of_another(checkpoints):
    workers = ppo(checkpoints["untied"], critic={"path": checkpoints["small"]})
    plan = tiny.whole(batch(checkpoints["untied"]))
    workers.update(plan, 5, ("critic",))
    before = score_one(workers, plan.sequences[0])
    wanted = local(recipe(checkpoints["untied"]))
    assert before.tobytes() == score_one(wanted, plan.sequences[0]).tobytes()


@pytest.mark.parametrize("holds", [("policy",), ("critic",), ("reference",)])
def test_a_process_builds_only_what_it_holds(checkpoints, holds):
    spec = WorkerSpec(
        recipe(checkpoints["small"]),
        PolicyObjective(tiny.Sampling()),
        100,
        with_reference=True,
        holds=holds,
        samples=False,
        critic_objective=ValueObjective(clip=None),
    )
    worker = build_worker(spec)
    held = {"policy": worker.policy, "critic": worker.critic, "reference": worker.reference}
    assert [role for role, one in held.items() if one is not None] == list(holds)
    assert worker.sampling_policy is None
    plan = tiny.whole(batch(checkpoints["small"]))
    assert list(worker.update(plan, 5, BOTH)) == [role for role in holds if role != "reference"]


def test_a_run_without_a_critic_says_so(checkpoints):
    workers = local(recipe(checkpoints["small"]))
    with pytest.raises(ConfigError, match="this run has no critic"):
        workers.values(tiny.whole(batch(checkpoints["small"])))


def test_recomputed_layers_of_a_critic_give_the_same_steps(checkpoints):
    path = checkpoints["tied"]
    plan = tiny.whole(batch(path))
    found = []
    for recompute in (False, True):
        workers = ppo(path, model={"gradient_checkpointing": recompute})
        found.append([workers.update(plan, n, BOTH).metrics["critic/loss"].value for n in (1, 2, 3)])
    np.testing.assert_allclose(*found, rtol=1e-6)
    assert found[0][2] < found[0][0], found


# ---------------------------------------------------------------------------------------------------------------- LoRA
def test_with_adapters_the_reference_is_the_policy_without_them(checkpoints):
    path = checkpoints["untied"]
    workers, plan = ppo(path, model={"lora": LORA}), tiny.whole(batch(path))
    start = workers.logprobs(plan, "reference")
    for n in (1, 2, 3):
        workers.update(plan, n, BOTH)
    whole_copy = ppo(path)
    for kept, now, policy, copy in zip(
        start,
        workers.logprobs(plan, "reference"),
        workers.logprobs(plan, "policy"),
        whole_copy.logprobs(plan, "reference"),
        strict=True,
    ):
        assert kept.tobytes() == now.tobytes()
        np.testing.assert_allclose(now, copy, rtol=0, atol=1e-6)
        assert np.abs(policy - now).max() > 1e-3


def test_with_adapters_a_critic_trains_its_own_and_its_head(checkpoints, tmp_path):
    path = checkpoints["untied"]
    workers, plan = ppo(path, model={"lora": LORA}), tiny.whole(batch(path))
    losses = [workers.update(plan, n, ("critic",)).metrics["critic/loss"].value for n in range(1, 9)]
    assert losses[-1] < 0.8 * losses[0], losses
    workers.export(tmp_path / "critic", "critic")
    start, now = weights(path), weights(tmp_path / "critic")
    moved = {name for name in now if name in start and not torch.equal(now[name], start[name])}
    assert moved
    assert all("_proj" in name for name in moved)
    assert now["score.weight"].abs().max() > 0
    assert (tmp_path / "critic/adapter/adapter_model.safetensors").is_file()


# ----------------------------------------------------------------------------------------------- what the policy may be
def pairs(path):
    made = [replace(s, action_positions=s.action_positions[-1:]) for s in tiny.sequences(tiny.make_kit(path), (3, 5))]
    made = [
        replace(s, advantages=None, old_logprobs=None, rollout_logprobs=None, reference_logprobs=None) for s in made
    ]
    return [replace(s, preference=Preference(chosen=n == 0)) for n, s in enumerate(made)]


def test_a_reward_model_is_a_policy_with_a_scalar_head(checkpoints, tmp_path):
    path = checkpoints["untied"]
    workers = local(recipe(path), RewardModelObjective(RMConfig()), trains="value", samples=False)
    plan = make_plan(pairs(path), num_ranks=1, max_tokens=1000, normalizer="sequence", unit_of=["pair", "pair"])
    first = workers.evaluate(plan)["loss"].value
    assert first == pytest.approx(np.log(2), abs=1e-6)
    for n in range(1, 6):
        workers.update(plan, n)
    assert workers.evaluate(plan)["loss"].value < 0.9 * first
    chosen, rejected = (float(x[0]) for x in workers.logprobs(plan, "policy"))
    assert chosen > rejected
    workers.export(tmp_path / "rm")
    config = read_json(tmp_path / "rm/config.json")
    assert config["architectures"] == ["Qwen3ForSequenceClassification"]
    assert config["skirl_reward_form"] == "answer_and_end"


def test_a_reward_model_that_is_trained_on_forgets_the_scores_of_its_start(checkpoints, tmp_path):
    """Mean and standard deviation are measured at each export; where they cannot be, none are stored."""
    first = local(recipe(checkpoints["untied"]), RewardModelObjective(RMConfig()), trains="value", samples=False)
    first.export(tmp_path / "first")
    file = tmp_path / "first/config.json"
    file.write_text(json.dumps(read_json(file) | {MEAN: 0.25, STD: 2.0}))
    again = local(recipe(tmp_path / "first"), RewardModelObjective(RMConfig()), trains="value", samples=False)
    again.export(tmp_path / "again")
    assert not {MEAN, STD} & read_json(tmp_path / "again/config.json").keys()


def test_a_process_reward_model_reads_every_step(checkpoints, tmp_path):
    path = checkpoints["untied"]
    config = recipe(path, prm={"separator": ";"})
    workers = local(config, StepRewardObjective(), trains="value", samples=False)
    made = tiny.sequences(tiny.make_kit(path), (2, 3), streams=False)
    plan = tiny.whole([replace(s, labels=np.full(s.num_actions, 1.0, dtype=np.float32)) for s in made])
    for n in range(1, 6):
        workers.update(plan, n)
    assert min(v.min() for v in workers.logprobs(plan, "policy")) > 0
    workers.export(tmp_path / "prm")
    config = read_json(tmp_path / "prm/config.json")
    assert config["architectures"] == ["Qwen3ForTokenClassification"]
    assert config["skirl_step_separator"] == ";"
    config = recipe(path, critic={"path": tmp_path / "prm"})
    workers = local(config, critic_objective=ValueObjective(clip=None))  # no number of it scores a response any more
    workers.export(tmp_path / "critic", "critic")
    assert "skirl_step_separator" not in read_json(tmp_path / "critic/config.json")


def test_a_policy_beside_a_teacher_is_sampled_and_exported_alone(checkpoints, tmp_path):
    path, teacher = checkpoints["tied"], checkpoints["untied"]
    config = recipe(path, kd={"teacher": teacher}, trainer={"optim": {"lr": 3e-3}})
    workers = local(config, DistillationObjective(1.0), trains="distilled", reference_path=teacher)
    kit = tiny.make_kit(path)
    plan = tiny.whole(tiny.sequences(kit, LENGTHS, streams=False))
    first = workers.evaluate(plan)["kd/divergence"].value
    for n in range(1, 9):
        workers.update(plan, n)
    assert workers.evaluate(plan)["kd/divergence"].value < 0.9 * first
    workers.commit(8)
    prompts = kit.prompts(2)
    found = workers._worker.generate(tiny.requests(prompts, kit.sampling(max_new_tokens=4)))
    assert [len(rollout.response_ids) > 0 for rollout in found] == [True, True]
    workers.export(tmp_path / "out")
    assert weights(tmp_path / "out").keys() == weights(path).keys()
    alone = local(recipe(tmp_path / "out"), SupervisedObjective())
    np.testing.assert_allclose(
        score_one(alone, plan.sequences[0]), score_one(workers, plan.sequences[0]), rtol=0, atol=1e-5
    )


def test_the_sampler_beside_a_teacher_shares_the_policys_weights(checkpoints):
    """A commit must not write sums of weights and adapters into the frozen weights that they were made from."""
    path, teacher = checkpoints["tied"], checkpoints["untied"]
    config = recipe(path, kd={"teacher": teacher}, model={"lora": LORA}, trainer={"optim": {"lr": 1e-2}})
    workers = local(config, DistillationObjective(1.0), trains="distilled", reference_path=teacher)
    plan = tiny.whole(tiny.sequences(tiny.make_kit(path), LENGTHS, streams=False))
    workers.update(plan, 1)
    before = score_one(workers, plan.sequences[0])
    workers.commit(1)
    assert score_one(workers, plan.sequences[0]).tobytes() == before.tobytes()


# --------------------------------------------------------------------------------------------------------------- files
def test_a_checkpoint_without_a_role_is_an_error(checkpoints, tmp_path):
    path = checkpoints["small"]
    alone, both = local(recipe(path)), ppo(path)
    alone.save(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["policy"]
    with pytest.raises(CheckpointError, match="holds no state of the critic"):
        both.load(tmp_path)
    (tmp_path / "policy/single.pt").rename(tmp_path / "single.pt")  # where skirl once kept it
    (tmp_path / "policy").rmdir()
    with pytest.raises(CheckpointError, match="version of skirl that kept the policy's files beside state"):
        alone.load(tmp_path)


def test_averages_and_adapters_are_exported_beside_the_policy(checkpoints, tmp_path):
    path = checkpoints["untied"]
    workers = local(recipe(path, model={"lora": LORA}, trainer={"optim": {"lr": 1e-2}, "ema": {"decay": 0.5}}))
    plan = tiny.whole(batch(path))
    for n in (1, 2):
        workers.update(plan, n)
    workers.export(tmp_path)
    start, now, average = weights(path), weights(tmp_path), weights(tmp_path / "ema")
    name = "model.layers.0.mlp.down_proj.weight"
    assert now.keys() == average.keys() == start.keys()
    assert not torch.equal(now[name], average[name])
    assert (now[name] - start[name]).abs().max() > (average[name] - start[name]).abs().max() > 0
    load_model(tmp_path / "ema", dtype="float32")
    assert (tmp_path / "adapter/adapter_config.json").is_file()


# -------------------------------------------------------------------------------------------------------------- reports
def test_ranks_add_up_role_by_role():
    def share(loss: float, tokens: float, norm: float) -> UpdateReport:
        return UpdateReport(3, (loss, loss), (norm, 2 * norm), (0.1, 0.2), {"x/tokens": Ratio(tokens, 2)}, tokens)

    shares = [
        {"policy": share(1.0, 5.0, 7.0)},
        {"policy": share(2.0, 6.0, 7.0)},
        {"critic": replace(share(3.0, 8.0, 9.0), metrics={"critic/loss": Ratio(1, 2), "policy/x": Ratio(1, 1)})},
        {"critic": replace(share(4.0, 9.0, 9.0), metrics={"critic/loss": Ratio(3, 2)})},
    ]
    found = merge_updates(shares, 0)
    assert (found.policy_version, found.losses, found.grad_norms, found.seconds) == (3, (3.0, 3.0), (7.0, 14.0), 9.0)
    assert found.metrics == {
        "x/tokens": Ratio(11, 4),
        "critic/loss": Ratio(4, 4),
        "critic/grad_norm": Ratio(18.0, 1),
        "critic/lr": Ratio(0.2, 1),
    }
    alone = merge_updates(shares[2:], 12)
    assert (alone.policy_version, alone.losses, alone.learning_rates) == (12, (), ())
    assert alone.metrics["critic/loss"] == Ratio(4, 4)


# -------------------------------------------------------------------------------------------------------------- rewards
@pytest.fixture(scope="module")
def reward_model(checkpoints, tmp_path_factory):
    """A reward model whose head is not zero."""
    path = checkpoints["untied"]
    directory = tmp_path_factory.mktemp("reward") / "model"
    local(recipe(path), RewardModelObjective(RMConfig()), trains="value", samples=False).export(directory)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tensors["score.weight"] = torch.randn(tensors["score.weight"].shape, generator=torch.Generator().manual_seed(1))
    save_file(tensors, file, metadata={"format": "pt"})
    return directory


def test_reward_models_score_by_name_from_any_thread(checkpoints, reward_model):
    load_value_model(reward_model, kind=None, dtype="float32")
    models = {"good": {"path": reward_model}, "other": {"path": reward_model, "max_tokens_per_batch": 4}}
    workers = local(recipe(checkpoints["small"], reward={"models": models}), reward_models=("good",))
    texts = [RewardText(({"role": "user", "content": "number"},), f"answer {n}") for n in range(6)]
    wanted = workers.reward_scores("good", texts)
    assert len({round(float(score), 4) for score in wanted}) > 3  # type: ignore[arg-type]
    found: dict[int, Any] = {}

    def score(number: int) -> None:
        found[number] = workers.reward_scores("good", texts[number : number + 1])[0]

    threads = [threading.Thread(target=score, args=(n,)) for n in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_allclose([found[n] for n in range(len(texts))], wanted, rtol=0, atol=1e-5)
    assert "reward model good: all frozen" in workers.describe()
    assert "other" not in workers.describe()


# ------------------------------------------------------------------------------------------------------------ processes
def test_processes_of_two_roles_are_called_together(monkeypatch):
    """All calls are begun before any is waited for, and a rank's failure is told with its name."""
    from skirl.runtime.ray import ranks as module

    def made(role: str, actors: list[str]) -> Any:
        one: Any = module.Ranks.__new__(module.Ranks)
        one.role, one.actors, one.identities = role, actors, [f"{role} {actor}" for actor in actors]
        one._config = RayRuntimeConfig(kind="ray")
        return one

    events: list[str] = []

    def wait(references: list[str], what: str, names: list[str], *_: Any, **__: Any) -> list[str]:
        events.append("wait")
        return [f"{name}: {reference}" for name, reference in zip(names, references, strict=True)]

    monkeypatch.setattr(module, "wait", wait)
    policy, critic = made("policy", ["a", "b"]), made("critic", ["c", "d"])
    found = policy.call("the update", lambda actor: events.append(actor) or actor, beside=[critic])
    assert events == ["a", "b", "c", "d", "wait"]
    assert found == ["policy a: a", "policy b: b", "critic c: c", "critic d: d"]


@pytest.mark.parametrize(("ema", "wanted"), [({"decay": 0.9}, "resident"), (None, "offloaded")])
def test_averages_that_were_given_back_are_taken_again_for_an_export(checkpoints, ema, wanted):
    """Exports come after the commit, when engines that share the GPUs have them."""
    from skirl.runtime.phases import Phases
    from skirl.runtime.ray.workers import RayWorkers

    class Actions:
        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: {} if name == "peak_bytes" else 1

    phases = Phases(Actions(), shared=True, sleep_level=2)
    phases.enter("generate")
    assert phases.trainer == "offloaded"

    class Some:
        def call(self, what: str, of: Any) -> None:
            seen.append((what, phases.trainer))

    seen: list[Any] = []
    workers: Any = RayWorkers.__new__(RayWorkers)
    workers._phases, workers._ranks = phases, {"policy": Some()}
    workers._placement = SimpleNamespace(host_of=lambda role: "policy")
    config = recipe(checkpoints["small"], trainer={"offload": {}, "ema": ema})
    workers._spec = WorkerSpec(config, PolicyObjective(tiny.Sampling()), 100, with_reference=False)
    workers.export(Path("somewhere"))
    assert seen == [("exporting the policy", wanted)]


@pytest.mark.parametrize(("texts", "ranks", "sizes"), [(9, 1, [9]), (9, 2, [4, 5]), (9, 4, [4, 5]), (3, 2, [3])])
def test_texts_are_dealt_out_to_reward_ranks_in_turn(texts, ranks, sizes):
    from skirl.runtime.ray.rewards import RewardRanks

    class Some:
        actors = tuple(range(ranks))
        calls: ClassVar[list[Any]] = []

        def call_some(self, what: str, numbers: list[int], of: Any) -> list[Any]:
            assert len(set(numbers)) == len(numbers)
            self.calls.append(numbers)
            return [of(number, self) for number in numbers]

        @property
        def reward_scores(self) -> Any:
            return self

        def remote(self, name: str, share: list[RewardText]) -> list[str]:
            return [f"{name} {text.response}" for text in share]

    rewards: Any = RewardRanks(Some())  # type: ignore[arg-type]
    made = [RewardText((), str(n)) for n in range(texts)]
    for _ in range(2):
        assert rewards.scores("taste", made) == [f"taste {n}" for n in range(texts)]
    first = list(range(len(sizes)))
    assert Some.calls == [first, [(n + len(sizes)) % ranks for n in first]]
    assert rewards.scores("taste", []) == []
