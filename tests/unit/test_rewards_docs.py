"""Every block of docs/rewards.md runs."""

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from skirl.config.schema import RewardConfig
from skirl.rewards import serve
from skirl.rewards.combine import combine
from skirl.rewards.python_file import load
from skirl.rewards.server_app import parse_request
from skirl.rewards.wire import encode_sample, read_answer
from skirl.testing.reward_samples import make_sample

FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
BLOCKS = FENCE.findall((Path(__file__).parents[2] / "docs/rewards.md").read_text())


def blocks(language):
    return [text for name, text in BLOCKS if name == language]


def test_the_recipe_is_valid():
    [recipe] = blocks("yaml")
    config = RewardConfig.model_validate(yaml.safe_load(recipe))
    assert config.terms.keys() == {"accuracy", "keywords", "loops"}
    assert (config.services.keys(), config.models.keys()) == ({"judge"}, {"helpful"})


def test_the_files_run(tmp_path, monkeypatch, capsys):
    by_sample, by_group, by_batch, waiting, by_turn, combining, trial, library = blocks("python")
    path = tmp_path / "my_reward.py"

    def score(source, *samples):
        path.write_text(source)
        return load(path).score(samples)

    assert score(by_group, make_sample("ab"), make_sample("a")) == [{"shortest": 0.0}, {"shortest": 1.0}]
    assert score(by_batch, make_sample("a b"), make_sample("a a")) == [{"reward": 2.0}, {"reward": 1.0}]
    assert score(waiting, make_sample("please")) == [{"polite": 1.0}]
    assert score(combining, make_sample("x", scores={"judge": 1.0, "helpful": 0.2})) == [{"reward": 0.2}]
    [parts] = score(by_turn, make_sample("x", num_turns=2))
    assert combine([parts], {"turns": 2.0}).scores[0].turns == (0.0, 2.5)
    path.write_text(by_sample)
    monkeypatch.chdir(tmp_path)
    exec(compile(trial, "trial", "exec"), {})
    [parts] = eval(capsys.readouterr().out)
    assert parts == {"accuracy": pytest.approx(0.0), "keywords": 0.0, "fluency": -0.2, "speaker": 0.0}
    exec(compile(library, "library", "exec"), {})
    assert capsys.readouterr().out == "1.0\n0.5\n"


def test_requests_and_answers_are_of_the_form_shown():
    request, answer = blocks("json")
    [sample] = parse_request(request)
    assert json.loads(encode_sample(sample)) == json.loads(request)["samples"][0]
    number, parts, error = read_answer(answer.encode(), "judge", [1, 1, 1])
    assert (number, parts) == ({"judge": 0.5}, {"judge/clarity": 1.0, "judge/style": None})
    assert error.kind == "service"


def test_the_commands_parse(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my_reward.py").write_text("def reward(sample): return 1.0")
    Path("served.yaml").write_text("terms: {truncation: truncation}")
    commands = [line for text in blocks("bash") for line in text.splitlines() if line.startswith("skirl")]
    assert len(commands) == 3
    for command in commands:
        program, name, *words = shlex.split(command)
        assert (program, name) == ("skirl", "serve-reward")
        assert serve.configuration(words)
