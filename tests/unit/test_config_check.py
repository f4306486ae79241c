"""Contradictions between sections: the exact messages, and that sections a command does not read are not judged."""

from pathlib import Path

import pytest

from skirl.config.check import check, placement_groups
from skirl.config.load import load
from skirl.errors import ConfigError

RECIPE = """\
model: {path: m}
data:
  train: {a: {path: a.jsonl}}
  eval: {b: {path: b.jsonl}}
run: {dir: r}
sft: {steps: 3}
train: {prompts_per_step: 4}
reward: {terms: {accuracy: accuracy}}
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(RECIPE, encoding="utf-8")
    return Path("x.yaml")


def refusal(recipe: Path, command, *flags: str) -> str:
    loaded = load(recipe, flags)
    with pytest.raises(ConfigError) as caught:
        check(loaded.config, command, loaded.provenance)
    return str(caught.value)


def warnings(recipe: Path, command, *flags: str) -> list[str]:
    return check(load(recipe, flags).config, command)


@pytest.mark.parametrize("command", ["sft", "train", "eval"])
def test_a_plain_recipe_has_nothing_to_say(recipe, command):
    assert warnings(recipe, command) == []


def test_grpo_with_a_group_of_one(recipe):
    assert refusal(recipe, "train", "--rollout.group_size", "1") == (
        "method.advantage.kind = group_norm (preset grpo) compares the responses of a group, but "
        "rollout.group_size = 1 (--rollout.group_size) leaves nothing to compare: every advantage would be 0. "
        "Set rollout.group_size to 2 or more (8 is usual)."
    )
    assert warnings(recipe, "sft", "--rollout.group_size", "1") == []
    with pytest.raises(ConfigError, match=r"^method.advantage.kind = group_mean compares"):
        warnings(recipe, "train", "--rollout.group_size", "1", "--method.advantage", "group_mean")


@pytest.mark.parametrize(
    ("command", "flags", "expected"),
    [
        (
            "sft",
            "--sft null",
            "skirl sft needs the section sft: add `sft: {steps: 300, batch_size: 16}` to the recipe.",
        ),
        (
            "train",
            "--train null",
            "skirl train needs the section train: add `train: {steps: 100, prompts_per_step: 16}` to the recipe.",
        ),
        (
            "train",
            "--reward null",
            "skirl train needs the section reward: add `reward: {python: my_reward.py}`, or reward.terms, or both.",
        ),
        (
            "train",
            "--data.train.a null",
            "skirl train needs training data, but data.train is empty: add `data: {train: {my_data: {path: "
            "manifest.jsonl}}}`.",
        ),
        (
            "sft",
            "--data.train.a null",
            "skirl sft needs training data, but data.train is empty: add `data: {train: {my_data: {path: "
            "manifest.jsonl}}}`.",
        ),
        (
            "eval",
            "--data.eval.b null",
            "skirl eval needs held-out data, but data.eval is empty: add `data: {eval: {my_data: {path: "
            "manifest.jsonl}}}`.",
        ),
        (
            "train",
            "--data.eval.b null --evaluation.every 5",
            "evaluation.every = 5 (--evaluation.every) asks for evaluation, but data.eval is empty: "
            "add `data: {eval: {my_data: {path: manifest.jsonl}}}`, or remove evaluation.every.",
        ),
        (
            "sft",
            "--data.eval.b null --evaluation.before",
            "evaluation.before = true (--evaluation.before) asks for evaluation, but data.eval is empty: "
            "add `data: {eval: {my_data: {path: manifest.jsonl}}}`, or remove evaluation.before.",
        ),
        (
            "eval",
            "--data.max_seconds 0.1",
            "data.min_seconds = 0.1 (default) is not below data.max_seconds = 0.1 (--data.max_seconds), so that every "
            "clip is invalid: lower the one or raise the other.",
        ),
        (
            "train",
            "--rollout.sampling.temperature 0",
            "rollout.sampling.temperature = 0.0 (--rollout.sampling.temperature) is greedy: all responses to a "
            "prompt are "
            "equal and nothing is learned. Set it above 0 (1 is usual); evaluation is greedy in any case.",
        ),
        (
            "train",
            "--method.kl.estimator k1",
            "method.kl.estimator = k1 (--method.kl.estimator) has no useful gradient with method.kl.where = loss "
            "(preset grpo) (in expectation it is 0): set the estimator to k3 or k2, or method.kl.where to reward.",
        ),
        (
            "train",
            "--method.mini_batches 3",
            "train.prompts_per_step = 4 (x.yaml:7) cannot be dealt out evenly to method.mini_batches = 3 "
            "(--method.mini_batches): set train.prompts_per_step to 6, or method.mini_batches to one of 1, 2, 4.",
        ),
        (
            "sft",
            "--trainer.backend deepspeed --trainer.ranks 2",
            "trainer.backend.kind = deepspeed (--trainer.backend) needs one process for each of trainer.ranks = 2 "
            "(--trainer.ranks), but runtime.kind = local (default) has one process in all: set runtime to ray, or "
            "trainer.backend to single (which runs the ranks one after another).",
        ),
        (
            "train",
            "--runtime ray --trainer.ranks 2",
            "trainer.backend.kind = single (default) is one process, but trainer.ranks = 2 (--trainer.ranks) with "
            "runtime.kind = ray (--runtime) asks for one process a rank: set trainer.backend to deepspeed, or "
            "runtime to "
            "local (which runs the ranks one after another).",
        ),
        (
            "train",
            "--trainer.backend {kind:\xa0deepspeed,zero_stage:\xa00,offload_optimizer:\xa0true}",
            "trainer.backend.offload_optimizer = true (--trainer.backend) needs a sharded optimizer, but "
            "trainer.backend.zero_stage = 0 (--trainer.backend): raise it to 1 or more, or set offload_optimizer "
            "to false.",
        ),
        (
            "train",
            "--runtime ray --runtime.cpus_per_rank 1.5",
            "runtime.cpus_per_rank = 1.5 (--runtime.cpus_per_rank): Ray shares out whole units above 1; write 1 or 2.",
        ),
        (
            "train",
            "--rollout.engine vllm",
            "rollout.engine.kind = vllm (--rollout.engine) runs each engine as a Ray actor, but runtime.kind = local "
            "(default) has one process in all: set runtime to ray, or rollout.engine to policy.",
        ),
        (
            "train",
            "--runtime ray --runtime.placement [{roles:\xa0[policy,reference],gpus:\xa02}]",
            "runtime.placement[0] {roles: [policy, reference], gpus: 2} (--runtime.placement) gives 2 GPUs to the "
            "policy, but trainer.ranks "
            "= 1 (default) needs 1, one a rank: set gpus to 1 or trainer.ranks to 2.",
        ),
        (
            "train",
            "--runtime ray --runtime.placement [{roles:\xa0[policy],gpus:\xa01}]",
            "runtime.placement has no place for reference, which skirl train starts: add it to a group (such as "
            "runtime.placement[0] {roles: [policy], gpus: 1} (--runtime.placement)), or give it a group of its own.",
        ),
        (
            "train",
            "--runtime ray --method.kl null --runtime.placement [{roles:\xa0[policy,reference],gpus:\xa01}]",
            "runtime.placement[0] {roles: [policy, reference], gpus: 1} (--runtime.placement): reference is not "
            "used: method.kl is null: set "
            "method.kl, or take reference out of the group.",
        ),
        (
            "sft",
            "--model.freeze [encoder,adapter,language_model]",
            "model.freeze = [encoder, adapter, language_model] (--model.freeze) leaves nothing to train: take out "
            "at least "
            "one role.",
        ),
        (
            "sft",
            "--trainer.optim.schedule.final 0.1",
            "trainer.optim.schedule.final = 0.1 (--trainer.optim.schedule.final) has no meaning with "
            "trainer.optim.schedule.kind = constant (default): set the kind to linear or cosine, or remove final.",
        ),
        (
            "train",
            "--trainer.max_tokens_per_micro_batch 256",
            "A prompt and a response of rollout.sampling.max_new_tokens = 256 (default) tokens do not fit into "
            "trainer.max_tokens_per_micro_batch = 256 (--trainer.max_tokens_per_micro_batch): lower the one or "
            "raise the "
            "other.",
        ),
        (
            "train",
            "--data.prompt forced --reward.terms.tag language",
            "reward.terms.tag scores the language tag that the policy writes, but with data.prompt = forced "
            "(--data.prompt) the tag stands in the prompt: set data.prompt to tagged, or remove the term "
            "(reward.terms.tag: null).",
        ),
        (
            "train",
            "--reward.weights.brevity 2",
            "reward.weights = {...} belongs to a reward file, but reward.python is null: set it, or remove "
            "reward.weights.",
        ),
        (
            "train",
            "--reward.python r.py --reward.weights.accuracy 2",
            "reward.weights.accuracy and reward.terms.accuracy share a name, and would be one part in the logs: "
            "rename one of them.",
        ),
    ],
)
def test_refusals(recipe, command, flags, expected):
    words = [word.replace("\xa0", " ") for word in flags.split(" ")]
    assert refusal(recipe, command, *words) == expected


def test_all_refusals_at_once(recipe):
    flags = ["--rollout.group_size", "1", "--method.kl.estimator", "k1"]
    first, *rest = refusal(recipe, "train", *flags).split("\n")
    assert first == "skirl train cannot run this recipe, 2 reasons:"
    assert [line.split(" ")[2] for line in rest] == ["method.advantage.kind", "method.kl.estimator"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            "--method.normalizer.kind constant --method.normalizer.length 100",
            "method.normalizer.length = 100 is smaller than rollout.sampling.max_new_tokens = 256: a long response "
            "weighs "
            "more than 1.",
        ),
        (
            "--method.kl.where reward",
            "method.kl.estimator = k3 with method.kl.where = reward: in the reward only k1 has the gradient of the KL "
            "divergence; k2 and k3 are meant for method.kl.where = loss.",
        ),
        ("--data.eval.b.path a.jsonl", "data.train.a and data.eval.b are both a.jsonl: nothing is held out."),
        (
            "--trainer.ranks 64",
            "An optimizer step has 32 rollouts for trainer.ranks = 64: ranks will idle.",
        ),
    ],
)
def test_warnings(recipe, flags, expected):
    assert warnings(recipe, "train", *flags.split(" ")) == [expected]


@pytest.mark.parametrize(
    "flags",
    [
        "--method.kl.where reward --method.kl.estimator k1",
        "--method.kl null --method.mini_batches 2",
        "--trainer.backend deepspeed --trainer.ranks 2 --runtime ray",
        "--trainer.ranks 2",
        "--runtime ray --runtime.placement [{roles:\xa0[policy,reference],gpus:\xa01}]",
        "--runtime ray --rollout.engine vllm",
        "--runtime ray --rollout.engine vllm --runtime.placement [{roles:\xa0[policy,reference,rollout],gpus:\xa01}]",
        "--model.dtype bfloat16 --reward.terms.tag language",
    ],
)
def test_allowed(recipe, flags):
    assert warnings(recipe, "train", *(word.replace("\xa0", " ") for word in flags.split(" "))) == []


def test_a_placement_for_training_serves_the_other_commands(recipe):
    """What only training starts is left out there, and no reason to refuse."""
    groups = "[{roles: [policy], gpus: 1}, {roles: [reference], gpus: 2}]"
    flags = ["--runtime", "ray", "--runtime.placement", groups]
    assert [warnings(recipe, command, *flags) for command in ("sft", "train", "eval")] == [[], [], []]
    config = load(recipe, flags).config
    assert [group.roles for group in placement_groups(config, "train")] == [("policy",), ("reference",)]
    assert [group.roles for group in placement_groups(config, "eval")] == [("policy",)]
