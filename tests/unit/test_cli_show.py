"""``skirl show``: the sections that a command reads, and no others."""

from pathlib import Path

import pytest

from skirl.cli.main import main

RECIPE = """\
model: {path: m}
data: {train: {a: {path: a.jsonl}}}
run: {dir: r}
sft: {steps: 3}
rm: {steps: 4}
train: {prompts_per_step: 4}
reward: {terms: {accuracy: accuracy}}
critic: {warmup_steps: 2}
method: {preset: ppo, mini_batches: 2, correction: tis, shaping: {clip_range: [0, 1]}}
"""


@pytest.fixture
def shown(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(RECIPE, encoding="utf-8")

    def run(*flags: str) -> str:
        assert main(["show", "x.yaml", *flags]) == 0
        return capsys.readouterr().out

    return run


def sections(text: str) -> set[str]:
    """First names of the settings that are listed."""
    listed = (line.split()[0] for line in text.partition("\n\nmethod: ")[0].splitlines()[1:] if line.strip())
    return {name.split(".")[0] for name in listed if "." in name}


def test_sections_of_other_commands_are_left_out(shown) -> None:
    always = {"model", "data", "run", "rollout", "trainer", "runtime", "evaluation"}
    train = shown()
    assert sections(train) == always | {"train", "reward", "method", "critic"}
    assert sections(shown("--for", "rm").partition("\nskirl rm")[0]) == always | {"rm"}
    assert "skirl sft: what runs where" in shown("--train", "null")
    words = " ".join(train.split())
    for said in ("correction tis: Truncated", "shaping clip_range", "critic value_clip 0.2, warm-up of 2 steps"):
        assert said in words
