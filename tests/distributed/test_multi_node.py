"""Two Ray nodes on this machine, by the commands that a user would type: one run on both, a node that dies, the end.

The nodes keep their files and records in a directory of their own and show a token of their own, so that other Ray
clusters of this machine neither see nor lose anything.
"""

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from skirl.runtime.ray import node
from tests.e2e.recipes import largest_difference, metrics, write_recipe

TOLERANCE = 5e-5  # that of test_equal_runs.py
RAY = ["--", "--num-cpus=1", f"--object-store-memory={80 << 20}"]
STEPS = 3


class Shell:
    """Runs ``skirl`` for one machine: each has a directory of its own."""

    def __init__(self, root: Path) -> None:
        source = str(Path(node.__file__).parents[3])
        self.root = root
        self.env = os.environ | {"PYTHONPATH": source, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex()}

    def start(self, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "skirl", *words]
        return subprocess.Popen(command, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def run(self, *words: str, code: int = 0) -> str:
        process = self.start(*words)
        said = process.communicate(timeout=150)[0]
        assert process.returncode == code, said
        return said

    def directory(self, machine: str) -> Path:
        return self.root / machine

    def cluster(self, command: str, machine: str, *words: str, code: int = 0) -> str:
        return self.run("cluster", command, "--temp-dir", str(self.directory(machine)), *words, code=code)

    def record(self, machine: str) -> node.NodeRecord:
        return node.records(self.directory(machine))[0]


@pytest.fixture
def shell() -> Iterator[Shell]:
    root = Path(tempfile.mkdtemp(prefix="skirl-"))  # short: Ray's sockets lie below it
    yield Shell(root)
    for directory in root.iterdir():
        for record in node.records(directory):
            node.stop_node(record, grace_s=5.0)
    shutil.rmtree(root, ignore_errors=True)


def text_recipe(directory: Path, model: Path, steps: int) -> Path:
    """GRPO of a tiny text model on DeepSpeed; the reward counts sevens."""
    directory.mkdir(parents=True)
    prompts, reward = directory / "prompts.jsonl", directory / "reward.py"
    prompts.write_text("".join(json.dumps({"prompt": f"count to {i}"}) + "\n" for i in range(1, 9)))
    reward.write_text("def reward(sample):\n    return sample.text.count('7') / max(1, len(sample.text))\n")
    sections: dict[str, Any] = {
        "train": {"steps": steps, "prompts_per_step": 4},
        "method": {"kl": {"coef": 0.05}, "mini_batches": 2},
        "trainer": {"optim": {"lr": 1e-3}, "backend": {"kind": "deepspeed", "zero_stage": 2}, "ranks": 2},
        "runtime": {"kind": "ray", "cpus_per_rank": 0.5},
        "reward": {"python": str(reward)},
        "data": {"train": {"p": {"path": str(prompts)}}, "eval": {}},
    }
    return write_recipe(directory, model, **sections)


def until(true: Callable[[], bool], process: subprocess.Popen[str], timeout_s: float = 120.0) -> None:
    """Waits for something that a process does."""
    end = time.monotonic() + timeout_s
    while not true():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.05)


def first_steps(run: Path) -> list[dict[str, float]]:
    return [m for m in metrics(run) if m["step"] <= STEPS] if (run / "metrics.jsonl").exists() else []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_nodes_from_up_to_down(shell: Shell, tiny_text: Path, tmp_path: Path, record_property: Any) -> None:
    said = shell.cluster("up", "a", "--port", "0", *RAY)
    address = shell.record("a").address
    assert f"skirl cluster up --address {address}" in said
    assert f"--runtime.address {address}" in said

    # one node: half a core a rank puts both on the head
    recipe = text_recipe(tmp_path / "one", tiny_text, STEPS)
    said = shell.cluster("submit", "a", str(recipe), "--runtime.cpus_per_rank", "0.5")
    assert "in this shell; Ctrl-C interrupts it" in said
    one = first_steps(tmp_path / "one" / "run")
    assert one[-1]["step"] == STEPS

    # two nodes: a whole core a rank puts one on each, as each node has one
    shell.cluster("up", "b", "--address", address, *RAY)
    recipe = text_recipe(tmp_path / "two", tiny_text, 1000)
    process = shell.start("train", str(recipe), "--runtime.cpus_per_rank", "1", "--runtime.address", address)
    until(lambda: len(first_steps(tmp_path / "two" / "run")) == len(one), process)
    difference, where = largest_difference(one, first_steps(tmp_path / "two" / "run"))
    record_property("two nodes and one, largest difference", difference)
    assert difference < TOLERANCE, where

    found = json.loads(shell.cluster("status", "a", "--json"))
    assert [(n["head"], n["alive"], n["reserved"]) for n in found["nodes"]] == [
        (True, True, {"CPU": 1.0}),
        (False, True, {"CPU": 1.0}),
    ]
    assert found["resources"]["CPU"] == {"total": 2.0, "free": 0.0, "used": 2.0}
    said = shell.cluster("down", "b", code=1)
    assert "in use" in said
    assert "--force" in said

    # the second machine dies: no process of it is left to say so
    victims = session(shell.record("b"))  # one of the two ranks among them: either, as the nodes are alike
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    said = process.communicate(timeout=120)[0]
    assert process.returncode == 1, said
    error = said[said.index("\nerror: ") :]
    record_property("message", error)
    named = re.search(r"policy rank [01] of 2 \(process (\d+) on [\d.:a-f]+", error)
    assert named is not None, said
    assert int(named[1]) in victims, said

    found = json.loads(shell.cluster("status", "a", "--json"))
    assert found["groups"] == []
    assert found["resources"]["CPU"]["free"] == 1.0  # the head's; Ray may not have struck the other node out yet
    last = shell.record("a")
    assert "stopped the head" in shell.cluster("down", "a")
    assert session(last) == []
    assert "nothing to stop" in shell.cluster("down", "a", code=2)


def session(record: node.NodeRecord) -> list[int]:
    """Living processes that the node's process leads."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = file.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z" and int(fields[3]) == record.pid:
            found.append(int(file.parent.name))
    return found
