"""``skirl serve-reward``: end to end with the pool's own client; refusals; the token."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

import skirl
from skirl.config.rewards import RewardConfig
from skirl.errors import ConfigError, MissingExtra
from skirl.rewards import serve as serving
from skirl.rewards import services
from skirl.rewards.pool import RewardPool
from skirl.rewards.serve import serve
from skirl.testing.reward_samples import make_group, to_samples

TOKEN = "0123456789-a-test-token"
SOURCE = """
def reward(sample):
    if sample.text == "bad":
        raise ValueError("bad")
    return {"size": len(sample.text), "none": None}
"""


class Running:
    """``skirl serve-reward`` in a process of its own."""

    def __init__(self, *words, token=TOKEN, home):
        environment = {**os.environ, "PYTHONPATH": str(Path(skirl.__file__).parents[1]), "HOME": str(home)}
        environment.pop("SKIRL_REWARD_TOKEN", None)
        if token is not None:
            environment["SKIRL_REWARD_TOKEN"] = token
        program = "import sys; from skirl.rewards.serve import serve; sys.exit(serve(sys.argv[1:]))"
        command = [sys.executable, "-c", program, *words, "--port", "0", "--workers", "1"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        assert self.process.stderr is not None
        self.log = ""
        while not (found := re.search(r"on (http://\S+)/score", self.log)):
            line = self.process.stderr.readline()
            assert line, self.log
            self.log += line
        self.url = found[1]

    def stop(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        self.log += self.process.communicate(timeout=20)[1]
        return self.process.returncode

    def post(self, path="/score", *, token=TOKEN, **more):
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        return httpx.post(self.url + path, headers={**headers, **more.pop("headers", {})}, trust_env=False, **more)


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve")
    (folder / "my_reward.py").write_text(SOURCE)
    (folder / "served.yaml").write_text(
        f"reward:\n  python: {folder}/my_reward.py\n  weights: {{size: 0.5}}\n  terms: {{truncation: truncation}}\n"
    )
    made = Running(str(folder / "served.yaml"), "--max-body-mb", "1", home=folder)
    yield made
    assert made.stop() == 0
    assert "stopped" in made.log
    assert TOKEN not in made.log


def test_a_run_scores_with_it(running, monkeypatch):
    monkeypatch.setenv("JUDGE_TOKEN", TOKEN)
    config = {"services": {"judge": {"urls": [f"{running.url}/score"], "token_env": "JUDGE_TOKEN", "weight": 2.0}}}
    pool = RewardPool(RewardConfig.model_validate(config), to_samples)
    with contextlib.closing(pool):
        scores = asyncio.run(pool.score(make_group(["a", "bad", "", "dddd"]))).scores
    assert [one.total for one in scores] == [1.0, None, 0.0, 4.0]
    assert scores[0].parts == {"judge/size": 0.5, "judge/truncation": 0.0}
    assert scores[1].failure.kind == "service"
    assert scores[1].failure.message.endswith(
        "/score: it gave no score: raised: ValueError: bad (my_reward.py line 4, in reward)"
    )


@pytest.mark.parametrize(
    ("path", "token", "said"),
    [
        ("/score", None, r"/score: status 401: .*; it wants a token: set reward\.services\.judge\.token_env\)"),
        ("/score", TOKEN + "x", r"/score: status 401: .*; it does not take the token in JUDGE_TOKEN\)"),
        ("/scores", TOKEN, r"/scores: status 404: .*; correct the path in reward\.services\.judge\.urls"),
        ("", TOKEN, r"POST http://127\.0\.0\.1:\d+: status 404: .*; correct the path in reward\.services\.judge\.urls"),
    ],
)
def test_a_run_with_a_wrong_token_or_path_does_not_start(running, monkeypatch, path, token, said):
    monkeypatch.setattr(services, "START_WAIT_S", 0.1)
    monkeypatch.setenv("JUDGE_TOKEN", token or "")
    judge = {"urls": [running.url + path], "token_env": token and "JUDGE_TOKEN"}
    pool = RewardPool(RewardConfig.model_validate({"services": {"judge": judge}}), to_samples)
    with contextlib.closing(pool), pytest.raises(ConfigError, match=said):
        pool.start()


@pytest.mark.parametrize(
    ("request_", "status", "said"),
    [
        ({"token": None}, 401, "does not bear the right token"),
        ({"token": TOKEN + "x"}, 401, "does not bear the right token"),
        ({"content": b"[1", "headers": {"Content-Type": "application/json"}}, 400, "the body is not JSON"),
        ({"content": b"{}", "headers": {"Content-Type": "text/plain"}}, 415, "send JSON"),
        ({"json": {"samples": [{"text": "a"}, {"txt": "b"}]}}, 422, "samples.1.text: Field required"),
        ({"json": {"samples": [{"text": "a", "indx": 1}]}}, 422, "samples.0.indx: Extra inputs are not permitted"),
        ({"json": {"samples": [{"text": "a", "num_turns": 0}]}}, 422, "samples.0.num_turns: Input should be"),
        ({"json": {"samples": [{"text": "x" * (1 << 20)}]}}, 413, "longer than 1048576 bytes"),
        ({"json": {}, "path": "/"}, 404, "there is POST /score"),
    ],
)
def test_requests_that_are_refused(running, request_, status, said):
    answer = running.post(**{"json": {"samples": []}, **request_} if "content" not in request_ else request_)
    assert answer.status_code == status
    assert said in answer.json()["error"]


def test_a_long_body_without_its_length_is_refused(running):
    chunks = (b"x" * 65536 for _ in range(64))
    answer = running.post(content=chunks, headers={"Content-Type": "application/json"})
    assert answer.status_code == 413


def test_a_text_is_enough_and_health_needs_no_token(running):
    assert running.post(json={"samples": [{"text": "abc"}]}).json() == {
        "scores": [{"none": None, "size": 1.5, "truncation": 0.0}]
    }
    assert httpx.get(running.url + "/health", trust_env=False).json() == {"status": "ok"}


def test_a_token_is_made_once_and_only_its_place_is_told(tmp_path):
    (tmp_path / "r.py").write_text("async def reward(batch): return [len(s.text) for s in batch]")
    one = Running(str(tmp_path / "r.py"), token=None, home=tmp_path)
    path = tmp_path / ".skirl/reward_token"
    token = path.read_text().strip()
    assert path.stat().st_mode & 0o777 == 0o600
    assert one.post(token=token, json={"samples": [{"text": "a"}, {"text": "bb"}]}).json() == {"scores": [1.0, 2.0]}
    assert one.stop(signal.SIGINT) == 0
    assert len(token) >= 32
    assert token not in one.log
    assert "reward_token" in one.log


def test_without_a_token_only_loopback_names_are_answered(tmp_path):
    one = Running("--terms", "truncation", "--no-token", home=tmp_path)
    samples = [{"text": "a", "finish_reason": "length"}]
    assert one.post(token=None, json={"samples": samples}).json() == {"scores": [{"truncation": -0.5}]}
    answer = one.post(token=None, json={"samples": samples}, headers={"Host": "evil.example"})
    assert answer.status_code == 400  # a page whose name was pointed at 127.0.0.1
    assert one.stop() == 0


def refusal(monkeypatch, *words, token=None):
    monkeypatch.delenv("SKIRL_REWARD_TOKEN", raising=False)
    if token is not None:
        monkeypatch.setenv("SKIRL_REWARD_TOKEN", token)
    with pytest.raises(ConfigError) as caught:
        serve(["--port", "0", *words])
    return str(caught.value)


def test_refusals(monkeypatch, tmp_path):
    path = tmp_path / "r.py"
    path.write_text("def reward(samples): return [1.0] * len(samples)")
    assert "reward takes a whole group, but samples come here one by one" in refusal(
        monkeypatch, str(path), token=TOKEN
    )
    assert "whoever reaches this machine could use the service" in refusal(
        monkeypatch, "--terms", "truncation", "--host", "0.0.0.0", "--no-token"
    )
    assert "has no source of scores" in refusal(monkeypatch)
    assert "at least 16 ASCII characters; it has 5" in refusal(monkeypatch, "--terms", "truncation", token="short")
    assert "combine is for the recipe that trains" in refusal(
        monkeypatch, _yaml(tmp_path, "combine: python\npython: r")
    )
    assert "remove models from what is served" in refusal(monkeypatch, _yaml(tmp_path, "models: {rm: {path: x}}"))
    assert "terms.x: " in refusal(monkeypatch, _yaml(tmp_path, "terms: {x: {kind: acuracy}}"))
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o644)
    said = refusal(monkeypatch, "--terms", "truncation", "--token-file", str(token))
    assert f"can be read by others: run `chmod 600 {token}`" in said
    assert TOKEN not in said


def _yaml(folder, text):
    path = folder / "served.yaml"
    path.write_text(text)
    return str(path)


def test_a_port_in_use_is_named(monkeypatch):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refusal(monkeypatch, "--terms", "truncation", "--port", str(port), token=TOKEN)
    assert said == f"cannot listen on --host 127.0.0.1 --port {port}: the port is in use"


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(serving, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"run `pip install 'skirl\[serve\]'`"):
        serve(["--terms", "truncation"])
