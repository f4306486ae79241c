"""The command line: exit codes, streams, show, help, and that nothing heavy is imported."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import skirl.cli.main as cli
from skirl.cli.console import setup_logging
from skirl.config.recipe import Command
from skirl.errors import DataError, MissingExtra, ModelError, RewardError, TrainingDiverged

RECIPE = """\
model: {path: models/tiny}
data: {train: {a: {path: a.jsonl}}, eval: {b: {path: b.jsonl}}}
run: {dir: runs/a}
sft: {steps: 3}
train: {steps: 10}
reward: {terms: {accuracy: accuracy}}
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("models/tiny").mkdir(parents=True)
    Path("models/tiny/config.json").write_text("{}", encoding="utf-8")
    Path("x.yaml").write_text(RECIPE, encoding="utf-8")
    return "x.yaml"


@pytest.fixture(autouse=True)
def _no_handlers_left():
    root, ours = logging.getLogger(), logging.getLogger("skirl")
    before = (list(root.handlers), root.level, ours.level)
    yield
    root.handlers[:], root.level, ours.level = before


def runs(monkeypatch, action):
    """Lets a command start ``action`` instead of a run; returns what it was given."""
    started = []

    def start(command):
        def run(loaded):
            started.append((command, loaded.config.run.seed))
            if action is not None:
                raise action

        return run

    monkeypatch.setattr(cli, "_start", start)
    return started


def test_module_and_version():
    result = subprocess.run([sys.executable, "-m", "skirl", "--version"], capture_output=True, text=True, check=True)
    assert result.stdout == f"skirl {cli.skirl.__version__}\n"


@pytest.mark.parametrize("command", ["sft", "train", "eval"])
def test_a_run_that_is_done(recipe, monkeypatch, command):
    started = runs(monkeypatch, None)
    assert cli.main([command, recipe, "--run.seed", "4"]) == 0
    assert started == [(command, 4)]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DataError("bad row"), 2),
        (ModelError("bad model"), 2),
        (MissingExtra("pip install x"), 2),
        (RewardError("too many"), 1),
        (TrainingDiverged("nan"), 1),
    ],
)
def test_exit_codes_and_messages_without_traceback(recipe, monkeypatch, capfd, error, code):
    runs(monkeypatch, error)
    assert cli.main(["train", recipe]) == code
    out, err = capfd.readouterr()
    assert out == ""
    assert err == f"error: {error}\n"


def test_debug_shows_the_traceback(recipe, monkeypatch):
    runs(monkeypatch, RewardError("too many"))
    with pytest.raises(RewardError, match="too many"):
        cli.main(["train", recipe, "--debug"])


def test_a_bug_is_not_dressed_up(recipe, monkeypatch):
    runs(monkeypatch, KeyError("oops"))
    with pytest.raises(KeyError):
        cli.main(["train", recipe])


def test_bad_recipes_and_contradictions_exit_with_2(recipe, capfd):
    assert cli.main(["train", recipe, "--trainer.lr", "1"]) == 2
    assert capfd.readouterr().err == (
        "error: --trainer.lr: there is no setting trainer.lr; did you mean --trainer.optim.lr?\n"
    )
    assert cli.main(["train", recipe, "--rollout.group_size=1"]) == 2
    assert "rollout.group_size = 1 (--rollout.group_size) leaves nothing to compare" in capfd.readouterr().err


def test_a_checkpoint_that_is_none_is_refused_before_the_run_has_a_directory(recipe, monkeypatch, capfd):
    started = runs(monkeypatch, None)
    assert cli.main(["sft", recipe, "--model.path", "models/none"]) == 2
    assert "model.path = models/none (--model.path) is no directory on this machine" in capfd.readouterr().err
    assert started == []
    assert not Path("runs").exists()


def test_warnings_are_shown(recipe, monkeypatch, capfd):
    runs(monkeypatch, None)
    assert cli.main(["train", recipe, "--method.kl.where", "reward"]) == 0
    assert capfd.readouterr().err.startswith("warning: method.kl.estimator = k3 (preset grpo) with method.kl.where")


def test_sigterm_before_the_first_step_is_an_interrupt(recipe, monkeypatch, capfd):
    monkeypatch.setattr(cli, "_start", lambda command: lambda loaded: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("not handled by the command"))
    try:
        assert cli.main(["train", recipe]) == 130
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "interrupted. runs/a holds no checkpoint" in capfd.readouterr().err


def test_interrupt_says_how_to_go_on(recipe, monkeypatch, capfd):
    runs(monkeypatch, KeyboardInterrupt())
    assert cli.main(["train", recipe, "--run.seed", "3"]) == 130
    assert "runs/a holds no checkpoint to continue from; run.checkpoint_every saves them." in capfd.readouterr().err
    Path("runs/a/checkpoints/step-5").mkdir(parents=True)
    assert cli.main(["train", recipe, "--run.seed", "3"]) == 130
    assert capfd.readouterr().err.endswith("  skirl train x.yaml --run.seed 3 --run.resume\n")
    assert cli.main(["train", recipe, "--run.resume"]) == 130
    assert capfd.readouterr().err.endswith("  skirl train x.yaml --run.resume\n")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["sing"], "invalid choice: 'sing'"),
        (["train"], "the following arguments are required: RECIPE\nThe recipe comes first, then the flags."),
        (["train", "--run.resume", "x.yaml"], "The recipe comes first, then the flags."),
        (["train", "x.yaml", "y.yaml"], "unrecognized arguments: y.yaml"),
    ],
)
def test_bad_usage_exits_with_2(words, expected, capfd):
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 2
    assert expected in capfd.readouterr().err


def test_help_lists_the_settings(capfd):
    with pytest.raises(SystemExit) as caught:
        cli.main(["train", "--help"])
    assert caught.value.code == 0
    out = capfd.readouterr().out
    assert "usage: skirl train RECIPE [--section.setting VALUE ...]" in out
    assert "  --trainer.optim.lr  number > 0  [1e-06]\n      Peak learning rate.\n" in out
    assert max(len(line) for line in out.splitlines()) <= 100


# ----------------------------------------------------------------------------------------------------------------- show
def test_show_names_values_origins_loss_and_processes(recipe, capfd):
    shutil.rmtree("models")
    assert cli.main(["show", recipe, "--rollout.group_size", "6", "--run.seed=2"]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    rows = {tuple(line.split()) for line in out.splitlines()}
    assert ("model.path", "models/tiny", "x.yaml:1") in rows
    assert ("rollout.group_size", "6", "--rollout.group_size") in rows
    assert ("method.kl.coef", "0.04", "preset", "grpo") in rows
    assert ("trainer.optim.betas", "[0.9,", "0.95]", "default") in rows
    assert "P_it = -min(r_it A_i, clip(r_it, 0.8, 1.2) A_i)" in out
    assert "skirl train: what runs where" in out
    assert "model.path: there is no models/tiny yet" in out


def test_show_of_a_contradiction_shows_the_values_and_fails(recipe, capfd):
    assert cli.main(["show", recipe, "--rollout.group_size", "1"]) == 2
    out, err = capfd.readouterr()
    assert "rollout.group_size" in out
    assert err.startswith("error: method.advantage.kind = group_norm (preset grpo) compares")
    assert cli.main(["show", recipe, "--rollout.group_size", "1", "--for", "sft"]) == 0


def test_show_json(recipe, capfd):
    assert cli.main(["show", recipe, "--json", "--for=eval"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["command"] == "eval"
    assert found["config"]["train"]["steps"] == 10
    assert found["provenance"]["train.steps"] == "x.yaml:5"
    assert list(found["processes"]) == ["driver", "policy", "rollouts"]
    assert found["error"] is None


def test_show_and_help_import_nothing_heavy(recipe):
    script = (
        "import sys, skirl.cli.main as cli\n"
        "assert cli.main(['show', sys.argv[1]]) == 0\n"
        "heavy = {'torch', 'ray', 'transformers', 'deepspeed', 'numpy', 'pyarrow', 'vllm'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "import skirl.config.schema, skirl.config.load, skirl.config.check, skirl.config.explain, skirl.cli.help\n"
        "heavy = {'torch', 'ray', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    command = [sys.executable, "-c", script, str(Path(recipe).resolve())]
    source = Path(cli.skirl.__file__).parents[1]  # where the package is found, installed or not
    result = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


# -------------------------------------------------------------------------------------------------------------- logging
def test_logging_goes_to_the_run_directory_once(tmp_path, capfd):
    setup_logging(tmp_path)
    setup_logging(tmp_path)
    logging.getLogger("skirl.loop").info("step %d", 3)
    logging.getLogger("other").info("chatter")
    text = (tmp_path / "skirl.log").read_text(encoding="utf-8")
    assert text.count("step 3") == 1
    assert "INFO skirl.loop: step 3" in text
    assert "chatter" not in text
    setup_logging(None)
    logging.getLogger("skirl.loop").info("step 4")
    assert "step 4" not in (tmp_path / "skirl.log").read_text(encoding="utf-8")


def test_each_command_of_a_recipe_has_a_run():
    assert set(cli._RUNS) == set(get_args(Command))
    for command in cli._RUNS:
        assert cli._start(command).__name__ == f"run_{command}"


def test_tools_have_command_lines_of_their_own(tmp_path, monkeypatch, capfd):
    words = ["merge-lora", str(tmp_path), "--base", str(tmp_path), "--output", str(tmp_path / "out")]
    assert cli.main(words) == 2
    assert "is no adapter: there is no adapter_config.json and no adapter_model" in capfd.readouterr().err
    given = []
    monkeypatch.setattr("skirl.rewards.serve.serve", lambda argv: given.append(argv) or 0)
    assert cli.main(["serve-reward", "reward.py", "--port", "1"]) == 0
    assert given == [["reward.py", "--port", "1"]]
    with pytest.raises(SystemExit) as ended:
        cli.main(["merge-lora", "--help"])
    assert ended.value.code == 0
    assert "--trainer.ranks" not in capfd.readouterr().out
