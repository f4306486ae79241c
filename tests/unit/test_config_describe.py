"""The schema in words: every setting is documented and suggested, and the loss is told as the recipe has it."""

from pathlib import Path

import pytest

from skirl.cli.help import settings_help, settings_markdown
from skirl.config.describe import entries, nearest, plain, valid_paths
from skirl.config.explain import processes
from skirl.config.formula import loss_formula, method_record
from skirl.config.load import load

RECIPE = """\
model: {path: m}
data: {train: {a: {path: a.jsonl}}, eval: {b: {path: b.jsonl}}}
run: {dir: r}
sft: {steps: 3, batch_size: 5}
train: {steps: 10, prompts_per_step: 4}
reward: {python: my/r.py, weights: {cer: 2}, terms: {accuracy: accuracy, cut: {kind: truncation, weight: 0.25}}}
"""


@pytest.fixture
def config(tmp_path):
    path = Path(tmp_path / "x.yaml")
    path.write_text(RECIPE, encoding="utf-8")
    return lambda flags="": load(path, flags.split()).config


def test_every_setting_has_a_docstring_and_a_type():
    for entry in entries():
        assert entry.doc, entry
        assert entry.words or entry.kind, entry


def test_valid_paths_reach_into_names_choices_and_kinds():
    expected = {
        "data.train.<name>.path",
        "reward.terms.<name>.max_repeats",
        "trainer.backend.zero_stage",
        "trainer.backend.kind",
        "trainer.optim.schedule.kind",
        "method.kl.coef",
        "rollout.engine.batch_size",
    }
    assert expected <= set(valid_paths())
    assert len(valid_paths()) == len(set(valid_paths()))


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("trainer.lr", "trainer.optim.lr"),
        ("lr", "trainer.optim.lr"),
        ("temperature", "rollout.sampling.temperature"),
        ("rollout.temperature", "rollout.sampling.temperature"),
        ("method.clip_high", "method.policy_loss.high"),
        ("train.group_size", "rollout.group_size"),
        ("data.eval.clean.langauge", "data.eval.clean.language"),
        ("evaluation.tempreature", "evaluation.temperature"),
        ("run.keep-checkpoints", "run.keep_checkpoints"),
        ("kl_coef", "method.kl.coef"),
        ("optimizer.learning_rate", "trainer.optim.lr"),
        ("xyzzy", None),
    ],
)
def test_nearest(wrong, right):
    assert nearest(wrong) == right


def test_help_fits_100_columns_and_names_every_setting():
    text = settings_help()
    assert max(len(line) for line in text.splitlines()) <= 100
    assert "  --trainer.optim.lr  number > 0  [1e-06]\n      Peak learning rate.\n" in text
    assert "  --run.dir  path  (required)\n" in text
    assert "  --trainer.backend.zero_stage  whole number from 0 to 3  [2]\n" in text
    for entry in entries():
        assert entry.path in text
        if not entry.section and not entry.kind:
            assert f"`{entry.path}`" in settings_markdown()


def test_plain_is_yaml():
    values = (None, True, (1, 0.5), {}, Path("a/b"), 1e-6)
    assert [plain(value) for value in values] == ["null", "true", "[1, 0.5]", "{}", "a/b", "1e-06"]


def test_loss_of_grpo(config):
    assert [line for line, _ in loss_formula(config())] == [
        "L    = sum over responses i, tokens t of  w_it (P_it + 0.04 K_it)",
        "w_it = 1 / (S T_i),  S responses in the optimizer step, T_i action tokens",
        "P_it = -min(r_it A_i, clip(r_it, 0.8, 1.2) A_i)",
        "r_it = pi(y_it) / pi_old(y_it)",
        "K_it = exp(-d_it) - 1 + d_it,  d_it = log pi(y_it) - log pi_ref(y_it)",
        "A_i  = (R_i - mean R) / (std R + 1e-06)",
        "       over the G = 8 responses to a prompt, variance with 1/(G - 1)",
        "       exactly 0 where max R - min R <= 1e-08 max(1, max |R|)",
        "R_i  = r.py:reward (cer x 2.0, other parts x 1) + 1.0 accuracy + 0.25 cut",
        "pi, pi_old, pi_ref: probabilities at temperature 1.0",
    ]


def test_loss_of_a_changed_method(config):
    flags = (
        "--method.preset dr_grpo --method.normalizer.length 64 "
        "--method.policy_loss.high 0.28 --method.policy_loss.dual 3 "
        "--method.entropy_coef 0.01 --method.kl.where reward --method.kl.estimator k1 --method.kl.coef 0.1 "
        "--reward.terms.cut.weight -2 --rollout.sampling.top_p 0.9 --rollout.group_size 4"
    )
    lines = [line for line, _ in loss_formula(config(flags))]
    assert lines == [
        "L    = sum over responses i, tokens t of  w_it (P_it - 0.01 H_it)",
        "w_it = 1 / (S 64),  S responses in the optimizer step",
        "P_it = -min(r_it A_i, clip(r_it, 0.8, 1.28) A_i)",
        "       and where A_i < 0, at most -3.0 A_i",
        "r_it = pi(y_it) / pi_old(y_it)",
        "K_it = d_it,  d_it = log pi(y_it) - log pi_ref(y_it)",
        "H_it = entropy of pi at token t",
        "A_i  = R_i - mean R",
        "       over the G = 4 responses to a prompt",
        "       exactly 0 where max R - min R <= 1e-08 max(1, max |R|)",
        "R_i  = r.py:reward (cer x 2.0, other parts x 1) + 1.0 accuracy - 2.0 cut - 0.1 (sum over t of K_it at pi_old)",
        "pi, pi_old, pi_ref: probabilities at temperature 1.0, top_p 0.9",
    ]


def test_loss_of_ppo_and_of_dapo(config):
    lines = [line for line, _ in loss_formula(config("--method.preset ppo --method.kl.adaptive.target 3"))]
    assert lines[4:-1] == [
        "K_it = d_it,  d_it = log pi(y_it) - log pi_ref(y_it)",
        "beta = 0.02 at first; after a step of n responses with KL k each, times",
        "       1 + clip(k / 3.0 - 1, -0.2, 0.2) n / 10000",
        "A_it = e_it + 1.0 x 0.95 A_i,t+1",
        "e_it = u_it + 1.0 V_i,t+1 - V_it,  V the critic's, 0 past the end",
        "       then (A - mean) / sqrt(var + 1e-08) over the action tokens of the batch",
        "u_it = -beta K_it at pi_old, plus R_i at the last token (a turn's value at the turn's last)",
        "R_i  = r.py:reward (cer x 2.0, other parts x 1) + 1.0 accuracy + 0.25 cut",
        "critic: sum over i, t of w_it 0.5 max((V_it - G_it)^2, (Vc_it - G_it)^2)",
        "Vc_it = V_old + clip(V_it - V_old, -0.2, 0.2)",
        "G_it = A_it + V_it when the batch was made, not whitened",
    ]
    flags = "--method.preset dapo --method.correction tis --method.shaping.clip_range [0,1]"
    lines = [line for line, _ in loss_formula(config(flags))]
    assert lines[0] == "L    = sum over responses i, tokens t of  w_it c_it P_it"
    assert lines[4:6] == ["c_it = clip(v_it, 0.0, 2.0)", "v_it = pi_old(y_it) / engine(y_it)"]
    assert lines[-7:-1] == [
        "R_i  = S_i, shaped",
        "       clipped to [0.0, 1.0]",
        "       - 1.0 clip((T_i - 205) / 51, 0, 1)",
        "S_i  = r.py:reward (cer x 2.0, other parts x 1) + 1.0 accuracy + 0.25 cut",
        "groups are kept where 0.0 < mean score < 1.0 (raw), others replaced,",
        "       in up to 10 rounds a step",
    ]


def test_the_record_that_a_run_prints_names_every_setting_of_its_method(config):
    text = method_record(config("--method.preset ppo --critic.warmup_steps 3"))
    assert "  advantage = gae {gamma: 1.0, lam: 0.95, whiten: true}\n" in text
    assert "  kl = {where: reward, estimator: k1, coef: 0.02, adaptive: null}\n" in text
    assert "  critic: value_clip = 0.2, warmup_steps = 3\n" in text
    assert "  L    = sum over responses i" in text
    assert all(f"  {name} = " in text for name in type(config().method).model_fields if name != "preset")


def test_processes_of_a_training_run(config):
    flags = "--trainer.backend deepspeed --trainer.ranks 2 --runtime ray --method.epochs 2 --method.mini_batches 2"
    assert processes(config(flags), "train") == [
        ("driver", "1 process on this machine: loop, plan, ledger"),
        (
            "runtime",
            "Ray, started on this machine; a place is 1 CPU and 1 GPU where the cluster has GPUs",
        ),
        ("policy", "2 ranks: float32, deepspeed ZeRO-2"),
        ("reference", "frozen copy of the policy, in the policy's ranks (method.kl)"),
        (
            "rollouts",
            "the policy's own forward pass, in the policy's ranks: up to 128 responses a rank at once, 256 tokens each",
        ),
        ("rewards", "2 processes, 30.0 s a call"),
        ("a step", "4 prompts x 8 responses = 32 rollouts, 4 optimizer steps"),
        ("the run", "10 steps, 40 prompts, 320 rollouts"),
    ]


def test_processes_of_other_commands(config):
    assert dict(processes(config("--trainer.ranks 2"), "sft")) == {
        "driver": "1 process on this machine: loop, plan, ledger",
        "policy": "2 ranks in the driver, one after another: float32, single",
        "rollouts": "the policy's own forward pass, in the driver: up to 128 responses a rank at once, 256 tokens each",
        "a step": "5 rows",
        "the run": "3 steps, 15 rows",
    }
    assert dict(processes(config("--method.kl null"), "train"))["reference"] == "none (method.kl is null)"
    assert list(dict(processes(config(), "eval"))) == ["driver", "policy", "rollouts"]
    assert dict(processes(config("--rm {}"), "rm"))["a step"] == "16 pairs"
    assert "rollouts" not in dict(processes(config("--rm {}"), "rm"))
    kd = dict(processes(config("--kd.teacher t --kd.data on_policy"), "kd"))
    assert (kd["teacher"], "rollouts" in kd) == ("t, beside the policy", True)
    dpo = dict(processes(config("--dpo {} --model.lora {}"), "dpo"))
    assert dpo["reference"] == "the policy without its adapters"
    assert dpo["policy"].endswith("LoRA of rank 16")
    ppo = dict(processes(config("--method.preset ppo --reward.models.judge.path j"), "train"))
    assert ppo["critic"] == "value head on model.path, in the driver"
    assert ppo["reward model judge"] == "j, in the driver"
