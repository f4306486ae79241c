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
            "train",
            "--method.preset gspo --method.normalizer token",
            "method.policy_loss.kind = gspo (preset gspo), method.advantage.kind = group_norm (preset gspo), "
            "method.normalizer.kind = token (--method.normalizer): gspo is a loss of whole responses, whose value "
            "stands at each of their tokens: with the token normaliser long responses would count by their length; "
            "use the sequence normaliser, or token_level: true (docs/methods.md).",
        ),
        (
            "train",
            "--method.preset max_rl --method.kl {where:\xa0reward,estimator:\xa0k1}",
            "method.policy_loss.kind = ppo_clip (preset max_rl), method.advantage.kind = max_rl (preset max_rl), "
            "method.normalizer.kind = token (preset max_rl), method.kl.where = reward (--method.kl): max_rl needs "
            "scores >= 0, which a KL taken off them does not leave: use method.kl.where = loss (docs/methods.md).",
        ),
        (
            "train",
            "--method.advantage pass_at_k --rollout.group_size 4",
            "method.advantage.k = 4 (default) is not below rollout.group_size = 4 (--rollout.group_size): a draw of k "
            "would be the whole group, which tells no response from another, so every advantage would be 0. Raise "
            "rollout.group_size, or lower k.",
        ),
        (
            "train",
            "--method.policy_loss {kind:\xa0clip_cov,cov_low:\xa06}",
            "method.policy_loss.cov_low = 6.0 (--method.policy_loss) is not below method.policy_loss.cov_high = 5.0 "
            "(default), so that no token can be chosen: lower the one or raise the other.",
        ),
        (
            "train",
            "--method.correction tis --method.old_policy rollout",
            "method.correction.kind = tis (--method.correction) weighs the gap between the trainer's old policy and "
            "the engine, but method.old_policy = rollout (--method.old_policy) takes the ratio against the engine "
            "itself: set method.correction to null, or method.old_policy to trainer.",
        ),
        (
            "train",
            "--method.correction {kind:\xa0icepop,low:\xa09}",
            "method.correction.low = 9.0 (--method.correction) is not below method.correction.high = 5.0 (default): "
            "lower the one or raise the other.",
        ),
        (
            "train",
            "--critic.value_clip 0.1",
            "The section critic is not used: method.advantage.kind = group_norm (preset grpo) has no critic. Remove "
            "the section, or set method.preset to ppo (method.advantage to gae).",
        ),
        (
            "train",
            "--method.preset ppo --method.mini_batches 2 --critic.warmup_steps 9 --train.steps 9",
            "critic.warmup_steps = 9 (--critic.warmup_steps) is not below train.steps = 9 (--train.steps), so that "
            "the policy would never be trained: lower the one or raise the other.",
        ),
        (
            "train",
            "--method.shaping.clip_range [1,1]",
            "method.shaping.clip_range = [1.0, 1.0] (--method.shaping.clip_range) is empty or upside down: write "
            "[low, high].",
        ),
        (
            "train",
            "--method.shaping.truncation {}",
            "method.shaping.truncation sets neither of factor and score: set one of them, a factor in [0, 1] for the "
            "score of a cut-off response, or what it is worth.",
        ),
        (
            "train",
            "--method.shaping.truncation {factor:\xa00.5,score:\xa00}",
            "method.shaping.truncation sets both of factor and score: set one of them, a factor in [0, 1] for the "
            "score of a cut-off response, or what it is worth.",
        ),
        (
            "train",
            "--method.shaping.overlong.buffer_share 0.2 --rollout.sampling.max_new_tokens 2",
            "method.shaping.overlong.buffer_share = 0.2 (--method.shaping.overlong.buffer_share) of "
            "rollout.sampling.max_new_tokens = 2 (--rollout.sampling.max_new_tokens) is less than a token: raise the "
            "share, or set method.shaping.overlong to null.",
        ),
        (
            "train",
            "--method.advantage gdpo --method.shaping.clip_range [0,1]",
            "method.advantage.kind = gdpo (--method.advantage) reads the parts of a score, and method.shaping changes "
            "only the total: make what it does a part of the reward, or remove method.shaping.",
        ),
        (
            "train",
            "--method.advantage gdpo --reward.python r.py --reward.combine python --reward.terms {len:\xa0length}",
            "method.advantage.kind = gdpo (--method.advantage) reads every part of a score, also what reward.combine = "
            "python (--reward.combine) only logs (accuracy, len): set method.advantage.weights, with 0 for each "
            "part that must not count.",
        ),
        (
            "train",
            "--method.advantage reinforce --method.dynamic_sampling {} --rollout.group_size 1",
            "method.dynamic_sampling.keep.kind = spread (default) keeps groups whose scores differ, but "
            "rollout.group_size = 1 (--rollout.group_size) leaves none: raise the group's size, or set "
            "method.dynamic_sampling to null.",
        ),
        (
            "train",
            "--method.dynamic_sampling.keep {kind:\xa0mean_range,low:\xa01}",
            "method.dynamic_sampling.keep.low = 1.0 (--method.dynamic_sampling.keep) is not below "
            "method.dynamic_sampling.keep.high = 1.0 (default), so that no group would be kept: lower the one or "
            "raise the other.",
        ),
        (
            "train",
            "--method.dynamic_sampling.keep mean_range --method.shaping.clip_range [0,1]",
            "method.dynamic_sampling.keep.kind = mean_range (--method.dynamic_sampling.keep) judges raw scores, but "
            "method.shaping.clip_range = [0.0, 1.0] (--method.shaping.clip_range) changes them afterwards: a group "
            "inside the range may have equal scores left, and one outside of it a spread. Clip in the reward itself, "
            "or set method.dynamic_sampling.keep to spread.",
        ),
        (
            "rm",
            "",
            "skirl rm needs the section rm: add `rm: {steps: 300, batch_size: 16}` to the recipe.",
        ),
        (
            "kd",
            "",
            "skirl kd needs the section kd: add `kd: {teacher: path/to/teacher, steps: 300, batch_size: 16}` to the "
            "recipe.",
        ),
        (
            "kd",
            "--kd {teacher:\xa0t,data:\xa0on_policy,share:\xa00.5}",
            "kd.share = 0.5 (--kd) mixes in the cross-entropy of the answers' own tokens, but with kd.data = on_policy "
            "(--kd) the policy wrote them itself: set share to 1, or data to off_policy.",
        ),
        (
            "sample",
            "--sample.select best --reward null",
            "sample.select = best (--sample.select) goes by scores, but the recipe has no section reward: add "
            "`reward: {python: my_reward.py}`, or reward.terms, or set sample.select to all.",
        ),
        (
            "train",
            "--trainer.backend {kind:\xa0deepspeed,zero_stage:\xa01} --trainer.optim.muon.lr 1e-3",
            "trainer.optim.muon.lr = 0.001 (--trainer.optim.muon.lr), trainer.backend.zero_stage = 1 "
            "(--trainer.backend): trainer.optim.muon needs whole matrices, but trainer.backend.zero_stage 1 cuts them "
            "into shards: set trainer.backend.zero_stage 0, or leave trainer.optim.muon out.",
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
    words = [word.replace("\xa0", " ") for word in flags.split(" ") if word]
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
        "--method.preset gspo --method.policy_loss.token_level true --method.normalizer token",
        "--method.preset ppo --method.mini_batches 2 --rollout.group_size 1 --critic.warmup_steps 3",
        "--method.preset rloo",
        "--method.preset dapo --method.mini_batches 2 --method.dynamic_sampling.keep spread",
        "--method.correction sequence_is --method.advantage.kind gdpo",
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


SCORES = "{terms: {accuracy: null, a: {kind: math, weight: 0}, b: {kind: code, weight: %s}}}"
BY_FUNCTION = "{python: r.py, combine: python, terms: {a: {kind: math, weight: 2}, b: code}}"


def test_rewards_that_weigh_nothing(recipe):
    assert refusal(recipe, "train", "--reward", SCORES % 0) == (
        "reward.terms.a.weight = 0.0 (--reward), and no other source of scores weighs anything: every response would "
        "be worth 0 and nothing learned. Set reward.terms.a.weight to 1, or add a source that counts."
    )
    assert warnings(recipe, "train", "--reward", SCORES % 0.5) == []
    assert warnings(recipe, "sample", "--sample", "{}", "--reward", SCORES % 0) == []  # scores are written apart


def test_weights_that_the_function_does_without_are_named(recipe):
    loaded = load(recipe, ["--reward", BY_FUNCTION])
    assert check(loaded.config, "train", loaded.provenance) == [
        "reward.terms.a.weight = 2.0 (--reward) has no effect: with reward.combine = python (--reward) the parts that "
        "the function returns count alone, and the rest is logged."
    ]


def test_a_reward_is_judged_for_sampling_too(recipe):
    flags = ["--sample", "{}", "--reward.weights.x", "1"]
    assert refusal(recipe, "sample", *flags).startswith("reward.weights = {...} belongs to a reward file")
    assert warnings(recipe, "eval", *flags) == []


def test_a_placement_for_training_serves_the_other_commands(recipe):
    """What only training starts is left out there, and no reason to refuse."""
    groups = "[{roles: [policy], gpus: 1}, {roles: [reference], gpus: 1}]"
    flags = ["--runtime", "ray", "--runtime.placement", groups]
    assert [warnings(recipe, command, *flags) for command in ("sft", "train", "eval")] == [[], [], []]
    config = load(recipe, flags).config
    assert [group.roles for group in placement_groups(config, "train")] == [("policy",), ("reference",)]
    assert [group.roles for group in placement_groups(config, "eval")] == [("policy",)]
