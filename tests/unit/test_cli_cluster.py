"""``skirl cluster``: what it refuses and says, that it ends its own processes only, jobs."""

import asyncio
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skirl.cli import cluster
from skirl.cli.main import main
from skirl.errors import ConfigError, WorkerError
from skirl.runtime import env
from skirl.runtime.ray import node

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither records nor tokens of this user are touched."""
    monkeypatch.setattr(node, "default_directory", lambda: tmp_path / "records")
    monkeypatch.setattr(node, "LONGEST_DIRECTORY", 200)  # pytest's paths are long; no Ray comes up here
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")


def fails(capfd: pytest.CaptureFixture[str], *words: str, code: int = 2) -> str:
    assert main(["cluster", *words]) == code
    said = capfd.readouterr().err
    assert said.startswith("error: ") or "\nerror: " in said
    return said


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A server that accepts and says nothing."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# ------------------------------------------------------------------------------------------------------------- refusals
def test_a_taken_port(listener, tmp_path, capfd):
    port = listener.getsockname()[1]
    said = fails(capfd, "up", "--port", str(port))
    assert f"--port {port} is in use on {socket.gethostname()}" in said
    assert not list(tmp_path.rglob("node-*"))  # nothing was started


def test_an_address_that_does_not_answer(capfd):
    address, begun = f"127.0.0.1:{free_port()}", time.monotonic()
    said = fails(capfd, "up", "--address", address, "--timeout", "0.3")
    assert f"nothing answers at --address {address} within 0.3 s (--timeout)" in said
    assert time.monotonic() - begun < 5


def test_a_server_that_is_no_ray(listener, tmp_path, capfd):
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    said = fails(capfd, "up", "--address", address, "--timeout", "2", code=1)
    assert f"no node of {address} on {socket.gethostname()}: the node did not come up within" in said
    assert "the end of its log" in said
    (log,) = tmp_path.rglob("node-*.log")
    assert not [pid for pid in processes() if str(log.parent) in command_of(pid)]
    assert not list(tmp_path.rglob("node-*.json"))


def test_arguments_that_ray_refuses(capfd):
    said = fails(capfd, "up", "--port", "0", "--", "--num-cpus=many", code=1)
    assert "`ray start` ended with exit code 2" in said
    assert "'many' is not a valid integer" in said


def test_ray_not_installed(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    assert f"no `ray` beside {tmp_path / 'bin' / 'python'}" in fails(capfd, "up", "--port", "0")


def test_a_directory_too_long_for_sockets(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(node, "LONGEST_DIRECTORY", 40)
    long = tmp_path / ("x" * 40)
    assert "at most 40" in fails(capfd, "up", "--port", "0", "--temp-dir", str(long))
    assert not long.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["up", "--address", "head"], "'head' is not HOST:PORT"),
        (["up", "--address", "a:1", "--port", "2"], "--port and --hosts are for the head"),
        (["up", "--address", "a:1", "--hosts", "b"], "--port and --hosts are for the head"),
        (["status", "--", "--num-cpus=1"], "takes nothing after --"),
        (["status"], "start one, or name a cluster with --address"),
        (["submit", "r.yaml"], "start one, or name a cluster with --address"),
        (["submit", "--address", "a:1", "8", "r.yaml"], "RECIPE comes first"),
        (["down"], "nothing to stop"),
        (["down", "--address", "a:1"], "nothing to stop: no node of a:1"),
    ],
)
def test_what_makes_no_sense(words, message, capfd):
    assert message in fails(capfd, *words)


def test_usage(capfd):
    with pytest.raises(SystemExit) as stopped:
        main(["cluster", "start"])
    assert stopped.value.code == 2
    assert "'start'" in capfd.readouterr().err


def test_nothing_heavy_is_imported():
    code = "import sys, skirl.cli.cluster; print(sorted({'ray', 'torch', 'transformers'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


# --------------------------------------------------------------------------------------------------- processes, records
def processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def command_of(pid: int) -> str:
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def started(line: str) -> subprocess.Popen[str]:
    """A shell in a session of its own, ready when it has said so."""
    process = subprocess.Popen(["sh", "-c", line], start_new_session=True, stdout=subprocess.PIPE, text=True)
    wait_until_ready(process)
    return process


def end(process: subprocess.Popen[Any]) -> None:
    """With everything in its session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_until_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    with process.stdout as stdout:
        assert stdout.readline() == "ready\n"


def record_of(process: subprocess.Popen[str], **changes: Any) -> node.NodeRecord:
    born = int((Path("/proc") / str(process.pid) / "stat").read_text().rpartition(")")[2].split()[19])
    made = node.NodeRecord("10.0.0.1:6379", "10.0.0.1", process.pid, born, True, "label", "/dev/null", None)
    return replace(made, **changes)


def saved(directory: Path, *records: node.NodeRecord) -> None:
    directory.mkdir(exist_ok=True)
    for record in records:
        node.save(record, directory)


def test_a_record_that_the_machine_did_not_finish_writing_is_no_obstacle(tmp_path):
    """It lost power: the node is gone with it, and what is left of its record names nothing."""
    other = started("echo ready; sleep 63")
    try:
        saved(tmp_path, record_of(other))
        for number, content in enumerate(["", '{"address": "10.0', "[]", '{"hosts": []}']):
            (tmp_path / f"node-99999{number}.json").write_text(content)
        assert node.records(tmp_path) == [record_of(other)]
        assert [file.name for file in tmp_path.iterdir()] == [f"node-{other.pid}.json"]
    finally:
        end(other)


def test_stop_ends_the_session_and_nothing_else():
    stubborn = "trap '' TERM; sleep 61 & sleep 62 & echo ready; wait; wait"
    ours, other = started(stubborn), started("echo ready; sleep 63")
    try:
        assert node.stop_node(record_of(ours), grace_s=0.3) == 3
        ours.wait(5)
        for _ in range(100):  # whoever adopts them may take a moment to bury them
            left = [pid for pid in processes() if command_of(pid) in ("sleep 61 ", "sleep 62 ")]
            if not left:
                break
            time.sleep(0.05)
        assert not left
        assert other.poll() is None
        assert node.stop_node(record_of(other), grace_s=5.0) == 0  # SIGTERM was enough
    finally:
        end(other)


def test_another_process_with_the_same_number_is_left_alone(tmp_path, capfd):
    other = started("echo ready; exec sleep 64")
    try:
        stale = record_of(other, born=record_of(other).born + 1)
        saved(tmp_path / "records", stale)
        assert not node.is_running(stale)
        assert "nothing to stop" in fails(capfd, "down", "--force")
        assert node.stop_node(stale) == 0
        assert other.poll() is None
        assert not list(tmp_path.rglob("*.json"))  # the record is deleted
    finally:
        end(other)


def test_down_stops_the_recorded_node_though_its_head_is_gone(tmp_path, capfd):
    process = started("echo ready; sleep 65")
    saved(tmp_path / "records", record_of(process, head=False, address=f"127.0.0.1:{free_port()}"))
    begun = time.monotonic()
    assert main(["cluster", "down"]) == 0
    assert "stopped node 10.0.0.1" in capfd.readouterr().err
    assert process.wait(5) == -signal.SIGTERM
    assert time.monotonic() - begun < 20
    assert node.records(tmp_path / "records") == []


def test_two_clusters_on_one_machine_must_be_told_apart(tmp_path, capfd):
    one, two = started("echo ready; sleep 66"), started("echo ready; sleep 67")
    try:
        saved(tmp_path / "records", record_of(one), record_of(two, address="10.0.0.2:6379"))
        for command in ("status", "down"):
            said = fails(capfd, command)
            assert "10.0.0.1:6379" in said
            assert "10.0.0.2:6379" in said
        assert main(["cluster", "down", "--address", "10.0.0.2:6379", "--force"]) == 0
        assert one.poll() is None
    finally:
        end(one)
        two.wait(5)


def test_a_machine_joins_a_cluster_once(listener, tmp_path, capfd):
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    process = started("echo ready; sleep 68")
    try:
        saved(tmp_path / "records", record_of(process, address=address))
        assert f"already runs a node of {address}" in fails(capfd, "up", "--address", address)
    finally:
        end(process)


def test_the_token_is_made_only_where_none_is_and_nobody_chose(tmp_path, monkeypatch):
    file = tmp_path / "token"
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(file))
    assert env.missing_ray_token() is None  # a mode was chosen
    monkeypatch.delenv("RAY_AUTH_MODE")
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    assert env.missing_ray_token() == file
    file.write_text("secret")
    assert env.missing_ray_token() is None
    # In a process of its own: skirl does not choose a mode once ray is imported, and this one may have imported it.
    said = (
        "import os; from skirl.runtime.env import prepare_environment as p; p(); print(os.environ.get('RAY_AUTH_MODE'))"
    )
    assert subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True).stdout == "token\n"
    late = f"import sys; sys.modules['ray'] = sys; {said}"
    assert subprocess.run([sys.executable, "-c", late], capture_output=True, text=True, check=True).stdout == "None\n"


# ------------------------------------------------------------------------------------------------------------ ssh hosts
@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in that notes what it was asked; the host "bad" fails. Returns its notes."""
    notes, script = tmp_path / "notes", tmp_path / "bin" / "ssh"
    script.parent.mkdir()
    script.write_text(
        f'#!/bin/sh\nwhile [ "$1" = -o ]; do shift 2; done\necho "$1|$2" >> {shlex.quote(str(notes))}\n'
        'if [ "$1" = bad ]; then echo "no route" >&2; exit 7; fi\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    return notes


def test_hosts_are_stopped_by_ssh_and_failures_named(ssh, capfd):
    said = fails(capfd, "down", "--address", "10.0.0.1:6379", "--hosts", "a,bad", "--force", code=1)
    assert "1 of 2 machines failed: bad: exit code 7" in said
    assert "bad: no route" in said
    line = f"cd {Path.cwd()} && {sys.executable} -m skirl cluster down --address 10.0.0.1:6379 --force"
    assert sorted(ssh.read_text().splitlines()) == [f"a|{line}", f"bad|{line}"]
    assert said.count("$ ") == 2  # each command is printed


def test_down_stops_the_hosts_that_up_started(ssh, tmp_path):
    process = started("echo ready; sleep 69")
    saved(tmp_path / "records", record_of(process, hosts=("a", "b")))
    assert main(["cluster", "down", "--force"]) == 0
    assert [line.partition("|")[0] for line in sorted(ssh.read_text().splitlines())] == ["a", "b"]
    process.wait(5)


# ------------------------------------------------------------------------------------------------------------- versions
def answer(**versions: str) -> dict[str, Any]:
    return {"ip": "10.0.0.2", "hostname": "h", "head": False, "label": "x", "versions": versions, "error": None}


def test_differences_are_named():
    head = answer(python="3.11.7", ray="2.60.0", vllm="0.32.0")
    assert cluster._differences(head, answer(python="3.11.7", ray="2.60.0", vllm="0.32.0")) == ""
    found = cluster._differences(head, answer(python="3.11.7", ray="2.59.0", vllm="absent"))
    assert found == "ray 2.59.0 (head: 2.60.0), vllm absent (head: 0.32.0)"
    silent = {**answer(), "error": "no answer within 60 s"}
    assert "no answer within 60 s" in cluster._differences(head, silent)


# ------------------------------------------------------------------------------------------------------ runs, their end
RUN_HERE = """
import signal, sys
from skirl.cli.cluster import _run_here
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests may ignore it
sys.exit(_run_here(sys.argv[1:]))
"""
WAITS = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
try:
    print("ready", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize(
    ("code", "expected"), [("sys.exit(0)", 0), ("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", 137)]
)
def test_the_exit_code_is_that_of_the_run(code, expected):
    assert cluster._run_here([sys.executable, "-c", f"import os, sys; {code}"]) == expected


def test_sigterm_reaches_the_run():
    command = [sys.executable, "-c", RUN_HERE, sys.executable, "-c", WAITS]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    wait_until_ready(process)
    process.terminate()
    assert process.wait(60) == 143


def test_ctrl_c_in_a_terminal_ends_the_run_once():
    command = [sys.executable, "-c", RUN_HERE, sys.executable, "-c", WAITS]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    )
    wait_until_ready(process)
    os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to all in the foreground
    assert process.wait(60) == 130


class JobServer:
    """Speaks the part of Ray's job protocol that a submission needs; the real client talks to it."""

    def __init__(self, outcome: dict[str, Any]) -> None:
        self.outcome, self.submitted = outcome, []
        self._loop, up = asyncio.new_event_loop(), threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(up,), daemon=True)
        self._thread.start()
        assert up.wait(20)

    def _serve(self, up: threading.Event) -> None:
        from aiohttp import web

        async def version(_: Any) -> Any:
            return web.json_response({"version": "4", "ray_version": "2.60.0", "ray_commit": "x", "session_name": "s"})

        async def submit(request: Any) -> Any:
            self.submitted.append(await request.json())
            return web.json_response({"job_id": "x", "submission_id": self.submitted[-1]["submission_id"]})

        async def logs(request: Any) -> Any:
            socket = web.WebSocketResponse()
            await socket.prepare(request)
            await socket.send_str("step 1\n")
            await socket.send_str("step 2\n")
            await socket.close()
            return socket

        async def info(_: Any) -> Any:
            return web.json_response({"type": "SUBMISSION", "entrypoint": "x", **self.outcome})

        async def start() -> None:
            app = web.Application()
            app.router.add_get("/api/version", version)
            app.router.add_post("/api/jobs/", submit)
            app.router.add_get("/api/jobs/{id}/logs/tail", logs)
            app.router.add_get("/api/jobs/{id}", info)
            self._runner = web.AppRunner(app)
            await self._runner.setup()
            site = web.TCPSite(self._runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
            up.set()

        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(start())
        self._loop.run_forever()
        self._loop.run_until_complete(self._runner.cleanup())
        self._loop.close()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


@pytest.mark.filterwarnings("ignore:ssl=None is deprecated:DeprecationWarning")  # Ray's client, of aiohttp
@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        ({"status": "SUCCEEDED"}, 0),
        ({"status": "FAILED", "driver_exit_code": 2}, 2),
        ({"status": "STOPPED"}, 130),
    ],
)
def test_a_job_gives_its_output_and_exit_code(outcome, code, listener, capfd, monkeypatch, tmp_path):
    pytest.importorskip("aiohttp")  # comes with ray[default], without which there are no jobs
    monkeypatch.chdir(tmp_path)
    server, address = JobServer(outcome), f"127.0.0.1:{listener.getsockname()[1]}"
    try:
        words = ["--address", address, "--job-server", server.url, "it's.yaml", "--run.dir", "a b"]
        assert main(["cluster", "submit", *words]) == code
    finally:
        server.close()
    said = capfd.readouterr()
    assert said.out == "step 1\nstep 2\n"
    (job,) = server.submitted
    assert f"job {job['submission_id']} at {server.url}" in said.err
    assert f"job stop --address {server.url} {job['submission_id']}" in said.err
    assert shlex.split(job["entrypoint"]) == [
        *("cd", str(tmp_path), "&&", "exec", sys.executable, "-m", "skirl"),
        *("train", "it's.yaml", "--run.dir", "a b", "--runtime.address", address),
    ]
    assert job["runtime_env"] == {"env_vars": {"RAY_JOB_STOP_SIGNAL": "SIGINT"}}


def test_a_job_server_that_does_not_answer(listener, capfd):
    address, server = f"127.0.0.1:{listener.getsockname()[1]}", f"http://127.0.0.1:{free_port()}"
    said = fails(capfd, "submit", "--address", address, "--job-server", server, "r.yaml", code=1)
    assert f"Ray's job server at {server} did not take the job" in said


def test_detaching_needs_a_job_server(listener, capfd):
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    assert "ray[default]" in fails(capfd, "submit", "--address", address, "--detach", "r.yaml")


def test_errors_are_ours():
    with pytest.raises(ConfigError):
        node.wait_for_answer("nowhere", 0.1)
    with pytest.raises(WorkerError, match="failed with exit code"):
        cluster._ask("nonsense", "127.0.0.1:1", 30)


def test_documented_commands_parse():
    text = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    found = re.findall(r"^    skirl cluster (.*?)(?: +#.*)?$", text, re.MULTILINE)
    assert len(found) > 4
    for command in found:
        words = shlex.split(command)
        cluster._parser().parse_args(words[: words.index("--")] if "--" in words else words)
    documented = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))
    known = set(re.findall(r"--[a-z][a-z-]+", json.dumps([a.option_strings for a in actions()])))
    assert {"--hosts", "--block", "--force", "--detach", "--nodes", "--versions"} <= documented & known


def actions() -> list[Any]:
    (commands,) = [a for a in cluster._parser()._actions if a.dest == "command"]
    return [action for parser in commands.choices.values() for action in parser._actions]
