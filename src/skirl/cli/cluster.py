"""``skirl cluster up | submit | status | down``: the Ray cluster that runs go to, over ``ray start`` and Ray's jobs.

up -> one node on this machine, with a record of it -> submit, status -> down: that node and nothing else

Ray itself is asked in processes of their own, each with a deadline.
"""

import argparse
import json
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from rich.table import Table

from skirl.cli.console import output, terminal
from skirl.errors import ConfigError, WorkerError
from skirl.runtime.env import missing_ray_token, prepare_environment
from skirl.runtime.ray import node
from skirl.runtime.ray.node import NodeRecord
from skirl.runtime.stopping import interrupted_by_sigterm

__all__ = ["DESCRIPTION", "main"]

DESCRIPTION = "Start, use and stop a Ray cluster of several machines: up, submit, status, down."
DEFAULT_PORT = 6379
START_WITHIN_S = 120.0
LISTENS_WITHIN_S = 1.0
ANSWER_WITHIN_S = 60.0
ASK_VERSIONS_WITHIN_S = 120.0


def main(words: Sequence[str]) -> int:
    """Runs one command and returns its exit code; bad usage exits with 2."""
    own, rest = _partition(words)
    options = _parser().parse_args(own)
    options.directory = options.temp_dir or node.default_directory()
    if options.command == "up" and options.address is None:
        _make_token()
    prepare_environment()  # what is started and asked below inherits it
    if rest and options.command != "up":
        raise ConfigError(f"skirl cluster {options.command} takes nothing after --, got: {shlex.join(rest)}")
    commands = {"up": lambda o: _up(o, rest), "submit": _submit, "status": _status, "down": _down}
    try:
        return commands[options.command](options)
    except KeyboardInterrupt:
        _say("interrupted")
        return 130


# ------------------------------------------------------------------------------------------------------------ arguments
def _partition(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Words before and after the first ``--``; those after it go to ``ray start``."""
    cut = words.index("--") if "--" in words else len(words)
    return list(words[:cut]), list(words[cut + 1 :])


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.format_usage()}error: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="skirl cluster", description=DESCRIPTION, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)

    up = commands.add_parser("up", help="Start the head here, or join a cluster.", allow_abbrev=False)
    up.usage = "skirl cluster up [--address HOST:PORT] [options] [-- ARGUMENTS OF ray start]"
    up.add_argument("--address", metavar="HOST:PORT", help="join this cluster; without it a head starts here")
    up.add_argument("--port", type=int, help=f"of the head [{DEFAULT_PORT}]; 0 takes a free one")
    up.add_argument("--hosts", type=_names, default=(), metavar="A,B", help="machines that join, started by ssh")
    up.add_argument("--block", action="store_true", help="stay until the node ends; end the node on Ctrl-C or SIGTERM")
    up.add_argument("--no-check", action="store_true", help="do not compare versions with the head's")
    up.add_argument(
        "--timeout", type=float, default=START_WITHIN_S, metavar="S", help="deadline, seconds [%(default)g]"
    )

    submit = commands.add_parser("submit", help="Run skirl train on the cluster.", allow_abbrev=False)
    submit.usage = "skirl cluster submit [options] RECIPE [--section.setting VALUE ...]"
    submit.add_argument("--address", metavar="HOST:PORT", help="of the head; without it the node that runs here")
    submit.add_argument(
        "--for", dest="purpose", choices=("train", "sft", "eval"), default="train", help="[%(default)s]"
    )
    submit.add_argument(
        "--nodes", type=int, default=1, metavar="N", help="wait until so many nodes are up [%(default)s]"
    )
    submit.add_argument("--job-server", metavar="URL", help="of the head's dashboard, where it is not on this machine")
    submit.add_argument("--detach", action="store_true", help="do not follow the job's output (needs a job server)")
    submit.add_argument(
        "--timeout", type=float, default=START_WITHIN_S, metavar="S", help="for --nodes, seconds [%(default)g]"
    )
    submit.add_argument("recipe", metavar="RECIPE")
    submit.add_argument("flags", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)

    status = commands.add_parser("status", help="Nodes, resources, and which runs hold what.", allow_abbrev=False)
    status.add_argument("--address", metavar="HOST:PORT", help="of the head; without it the node that runs here")
    status.add_argument("--versions", action="store_true", help="ask each node what is installed; 1 if they differ")
    status.add_argument("--json", action="store_true", help="print one JSON object")

    down = commands.add_parser("down", help="Stop the node that up started on this machine.", allow_abbrev=False)
    down.add_argument("--address", metavar="HOST:PORT", help="only nodes of this cluster")
    down.add_argument("--hosts", type=_names, default=(), metavar="A,B", help="stop these machines' nodes too, by ssh")
    down.add_argument("--force", action="store_true", help="also while runs hold places there")
    for command in (up, submit, status, down):
        command.add_argument("--temp-dir", type=Path, metavar="DIR", help="Ray's files and this command's records")
        command.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _say(text: str) -> None:
    terminal().print(text, soft_wrap=True, markup=False, highlight=False)


# ------------------------------------------------------------------------------------------------------------------- up
def _up(options: argparse.Namespace, extra: Sequence[str]) -> int:
    directory: Path = options.directory
    record = _start(options, extra)
    try:
        if options.address and not options.no_check:
            _check_own_versions(record)
    except BaseException:  # fence: a node that differs, or was interrupted while it was asked, does not stay
        node.stop_node(record)
        node.forget(record, directory)
        raise
    output().print(_announcement(record, options.temp_dir), soft_wrap=True, markup=False, highlight=False)
    sys.stdout.flush()
    if options.hosts:
        node.save(record := replace(record, hosts=options.hosts), directory)
        _on_hosts(
            options.hosts,
            _remote("up", record.address, options.temp_dir, f"--timeout={options.timeout:g}"),
            options.timeout,
        )
    return _stay(record, directory) if options.block else 0


def _start(options: argparse.Namespace, extra: Sequence[str]) -> NodeRecord:
    directory: Path = options.directory
    if options.address is None:
        port = DEFAULT_PORT if options.port is None else options.port
        node.wait_for_port(port)
        return node.start_node(directory, port=port, address=None, arguments=extra, timeout_s=options.timeout)
    if options.port is not None or options.hosts:
        raise ConfigError("--port and --hosts are for the head; a machine that joins (--address) takes neither")
    begun = time.monotonic()
    node.wait_for_answer(options.address, options.timeout)
    if any(record.address == options.address for record in node.records(directory)):
        raise ConfigError(
            f"this machine already runs a node of {options.address}; a second one would offer its GPUs twice. "
            "`skirl cluster down` stops it"
        )
    left = options.timeout - (time.monotonic() - begun)
    return node.start_node(directory, port=None, address=options.address, arguments=extra, timeout_s=left)


def _make_token() -> None:
    """A head without a token takes orders from anyone on the network. The token is made by Ray and not read here."""
    file = missing_ray_token()
    if file is None:
        return
    command = [str(node.ray_executable()), "get-auth-token", "--generate"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    if done.returncode == 0 and file.exists():  # older releases of Ray know no tokens
        file.chmod(0o600)
        _say(f"made {file}: this cluster's nodes and runs show it; copy it to machines with another home directory")


def _announcement(record: NodeRecord, directory: Path | None) -> str:
    me = f"{shlex.quote(sys.executable)} -m skirl cluster"
    there = f" --temp-dir {shlex.quote(str(directory))}" if directory else ""
    if not record.head:
        return f"{record.ip} is a node of {record.address} (process {record.pid}, log {record.log})"
    warned = [line for line in Path(record.log).read_text(encoding="utf-8").splitlines() if "\tWARNING " in line]
    jobs = f"jobs go to {record.dashboard}" if record.dashboard else "no job server: runs stay in their shell"
    return "\n".join(
        [
            *(line.partition(" -- ")[2] for line in warned),
            f"the head is up at {record.address} (process {record.pid}, log {record.log}); {jobs}",
            f"on every other machine:  {me} up --address {record.address}{there}",
            f"a run on this cluster:   skirl train RECIPE --runtime.address {record.address}",
            f"or:                      {me} submit{there} RECIPE",
            f"at the end, everywhere:  {me} down{there}",
        ]
    )


def _check_own_versions(record: NodeRecord) -> None:
    answers = _ask("versions", record.address, ASK_VERSIONS_WITHIN_S)["nodes"]
    theirs = next(a for a in answers if a["head"])
    mine = next(a for a in answers if a["label"] == record.label)
    if found := _differences(theirs, mine):
        raise ConfigError(
            f"{_who(mine)} cannot join {record.address}: {found}. A run needs the same on all nodes: install the "
            "head's versions at the same path, or join with --no-check"
        )


def _differences(head: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """What is not as on the head, in words; empty where all is."""
    if head["error"] or other["error"]:
        return f"its versions are unknown ({other['error'] or 'the head: ' + head['error']})"
    theirs, mine = head["versions"], other["versions"]
    return ", ".join(f"{name} {mine[name]} (head: {theirs[name]})" for name in theirs if mine[name] != theirs[name])


def _who(answer: Mapping[str, Any]) -> str:
    return f"node {answer['ip']} ({answer['hostname']})"


def _stay(record: NodeRecord, directory: Path) -> int:
    with interrupted_by_sigterm():
        try:
            while node.is_running(record):
                time.sleep(1.0)
        except KeyboardInterrupt:
            node.stop_node(record)
            node.forget(record, directory)
            _say(f"stopped node {record.ip} of {record.address}")
            return 0
    node.forget(record, directory)
    text = Path(record.log).read_text(encoding="utf-8", errors="replace")
    raise WorkerError(f"node {record.ip} of {record.address} ended by itself; the end of its log:\n{node.tail(text)}")


# ------------------------------------------------------------------------------------------------------- other machines
def _remote(command: str, address: str, directory: Path | None, *flags: str) -> str:
    words = [sys.executable, "-m", "skirl", "cluster", command, "--address", address, *flags]
    words += ["--temp-dir", str(directory)] if directory else []
    return f"cd {shlex.quote(str(Path.cwd()))} && {shlex.join(words)}"


def _on_hosts(hosts: Sequence[str], line: str, timeout_s: float) -> None:
    """Runs a shell line on each machine by ssh, all at once; raises with the names of those where it failed."""
    ssh = shutil.which("ssh")
    if ssh is None:
        raise ConfigError("--hosts needs ssh, and there is none on this machine; run the command on each host by hand")

    def run(host: str) -> str | None:
        command = [ssh, "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", host, line]
        _say(f"$ {shlex.join(command)}")
        limit = timeout_s + ASK_VERSIONS_WITHIN_S
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit)
        except subprocess.TimeoutExpired:
            return f"{host}: no end within {limit:g} s"
        _say(f"{host}: {done.stderr.strip() or done.stdout.strip() or 'done'}")
        return None if done.returncode == 0 else f"{host}: exit code {done.returncode}"

    with ThreadPoolExecutor(len(hosts)) as pool:
        failed = [problem for problem in pool.map(run, hosts) if problem]
    if failed:
        raise WorkerError(
            f"{len(failed)} of {len(hosts)} machines failed: {'; '.join(failed)}. The others and this one are as asked"
        )


# --------------------------------------------------------------------------------------------------------------- status
def _ask(question: str, address: str, timeout_s: float) -> dict[str, Any]:
    """One question to Ray, in a process of its own.

    Raises:
        ConfigError: no cluster can be reached at the address from here.
        WorkerError: no answer in time.
    """
    command = [sys.executable, "-m", "skirl.runtime.ray.head", question, address]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as error:
        raise WorkerError(f"the cluster at {address} did not say anything within {timeout_s:g} s") from error
    lines = done.stdout.strip().splitlines()
    if done.returncode not in (0, 1) or not lines:
        raise WorkerError(f"asking {address} failed with exit code {done.returncode}:\n{node.tail(done.stderr)}")
    answer = json.loads(lines[-1])
    if "error" in answer:
        raise ConfigError(
            f"the cluster at {address} cannot be reached from this machine: {answer['error']}; it answers on machines "
            "that are nodes of it (`skirl cluster up --address` joins)"
        )
    return answer


def _address(options: argparse.Namespace) -> str:
    if options.address:
        return options.address
    found = sorted({record.address for record in node.records(options.directory)})
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(f"this machine runs nodes of several clusters: name one with --address: {', '.join(found)}")
    raise ConfigError(
        f"no node that `skirl cluster up` started runs here (records: {options.directory}); start one, or name a "
        "cluster with --address HOST:PORT"
    )


def _status(options: argparse.Namespace) -> int:
    address = _address(options)
    node.wait_for_answer(address, LISTENS_WITHIN_S)
    found: dict[str, Any] = {"address": address, **_ask("look", address, ANSWER_WITHIN_S)}
    differs: list[str] = []
    if options.versions:
        found["versions"] = answers = _ask("versions", address, ASK_VERSIONS_WITHIN_S)["nodes"]
        head = next(a for a in answers if a["head"])
        differs = [f"{_who(a)}: {words}" for a in answers if (words := _differences(head, a))]
    if options.json:
        sys.stdout.write(json.dumps(found, indent=1) + "\n")
    else:
        _show(found)
    sys.stdout.flush()
    if differs:
        raise WorkerError("nodes differ from the head: " + "; ".join(differs))
    return 0


def _show(found: Mapping[str, Any]) -> None:
    nodes = Table("node", "host", "state", "CPU reserved", "GPU reserved", title=f"cluster {found['address']}")
    for one in found["nodes"]:
        state = ("head" if one["head"] else "up") if one["alive"] else "gone"
        shares = [f"{one['reserved'].get(k, 0):g} of {one['total'].get(k, 0):g}" for k in ("CPU", "GPU")]
        nodes.add_row(one["ip"], one["hostname"], state, *(shares if one["alive"] else ("", "")))
    output().print(nodes)
    parts = (f"{k} {v['used']:g} used, {v['free']:g} free" for k, v in found["resources"].items())
    output().print("; ".join(parts), highlight=False)
    if not found["groups"]:
        output().print("no run holds anything", highlight=False)
        return
    runs = Table("run", "state", "places", "on")
    ips = {one["id"]: one["ip"] for one in found["nodes"]}
    for group in found["groups"]:
        where = sorted({ips[b["node"]] for b in group["bundles"] if b["node"] in ips})
        runs.add_row(group["name"], group["state"].lower(), _amount(group), ", ".join(where) or "-")
    output().print(runs)


def _amount(group: Mapping[str, Any]) -> str:
    return ", ".join(f"{amount:g} {kind}" for kind, amount in group["resources"].items())


# --------------------------------------------------------------------------------------------------------------- submit
def _submit(options: argparse.Namespace) -> int:
    if not options.recipe.endswith((".yaml", ".yml", ".json")):
        raise ConfigError(f"RECIPE comes first, then its flags; {options.recipe!r} is no YAML or JSON file")
    address = _address(options)
    node.wait_for_answer(address, LISTENS_WITHIN_S)
    _wait_for_nodes(address, options.nodes, options.timeout)
    words = [sys.executable, "-m", "skirl", options.purpose, options.recipe, *options.flags]
    words += ["--runtime.address", address]
    here = [record for record in node.records(options.directory) if record.address == address]
    server = options.job_server or next((record.dashboard for record in here if record.dashboard), None)
    if server is not None:
        return _submit_job(server, words, detach=options.detach)
    if options.detach:
        raise ConfigError(
            "--detach needs Ray's job server, and this cluster has none: install ray[default] on the head before "
            "`skirl cluster up`, or submit on the head, or name it with --job-server URL"
        )
    return _run_here(words)


def _wait_for_nodes(address: str, num_nodes: int, timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while num_nodes > 1:
        alive = [one["ip"] for one in _ask("look", address, ANSWER_WITHIN_S)["nodes"] if one["alive"]]
        if len(alive) >= num_nodes:
            return
        if time.monotonic() > end:
            raise WorkerError(
                f"--nodes {num_nodes}: only {len(alive)} came up within {timeout_s:g} s (--timeout): {', '.join(alive)}"
            )
        time.sleep(2.0)


def _run_here(words: Sequence[str]) -> int:
    """The run in this shell: Ctrl-C interrupts it, SIGTERM is passed on; its exit code is ours."""
    runs: list[subprocess.Popen[bytes]] = []
    early: list[int] = []

    def pass_on(number: int, frame: object) -> None:
        if runs:
            runs[0].send_signal(number)
        else:
            early.append(number)

    old = {
        signal.SIGINT: signal.signal(signal.SIGINT, lambda *_: None),  # the terminal sends it to the run as well
        signal.SIGTERM: signal.signal(signal.SIGTERM, pass_on),
    }
    try:
        process = subprocess.Popen(words)
        runs.append(process)
        if early:
            process.terminate()
        _say(f"run {process.pid} in this shell; Ctrl-C interrupts it\n$ {shlex.join(words)}")
        code = process.wait()
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _submit_job(server: str, words: Sequence[str], *, detach: bool) -> int:
    from skirl.runtime.ray import jobs

    name = f"skirl-{uuid.uuid4().hex[:8]}"
    jobs.submit(server, jobs.entry_point(words, str(Path.cwd())), name)
    ray = shlex.quote(str(node.ray_executable()))
    hint = (
        f"follow: {ray} job logs --address {server} --follow {name}\nstop:   {ray} job stop --address {server} {name}"
    )
    _say(f"job {name} at {server}; Ctrl-C ends the view, not the job\n{hint}")
    if detach:
        return 0
    try:
        return jobs.follow(server, name, sys.stdout.write)
    except KeyboardInterrupt:
        _say(f"\njob {name} goes on\n{hint}")
        return 130


# ----------------------------------------------------------------------------------------------------------------- down
def _down(options: argparse.Namespace) -> int:
    found = [r for r in node.records(options.directory) if options.address in (None, r.address)]
    hosts = options.hosts or tuple(dict.fromkeys(host for record in found for host in record.hosts))
    if not found and not hosts:
        of = f" of {options.address}" if options.address else ""
        raise ConfigError(
            f"nothing to stop: no node{of} that `skirl cluster up` started runs here ({options.directory})"
        )
    clusters = {record.address for record in found}
    if len(clusters) > 1:
        raise ConfigError(f"this machine runs nodes of several clusters: name one with --address: {sorted(clusters)}")
    if not options.force:
        for record in found:
            _refuse_while_held(record)
    if hosts:
        address = options.address or next(iter(clusters), None)
        if address is None:
            raise ConfigError("--hosts needs --address HOST:PORT where no node runs on this machine")
        _on_hosts(
            hosts, _remote("down", address, options.temp_dir, *(["--force"] if options.force else [])), START_WITHIN_S
        )
    for record in sorted(found, key=lambda r: r.head):  # the head last: the others leave while it listens
        killed = node.stop_node(record)
        node.forget(record, options.directory)
        how = f" ({killed} processes had to be killed)" if killed else ""
        _say(f"stopped {'the head' if record.head else 'node ' + record.ip} of {record.address}{how}")
    return 0


def _refuse_while_held(record: NodeRecord) -> None:
    """Raises where runs hold places that would be lost: all of the cluster's for the head, else those of the node."""
    try:
        node.wait_for_answer(record.address, LISTENS_WITHIN_S)
        found = _ask("look", record.address, ANSWER_WITHIN_S)
    except ConfigError:
        return  # the head is gone: nothing can run here any more
    except WorkerError as error:
        raise WorkerError(f"{error}: what runs there is unknown; --force stops the node unasked") from error
    mine = {one["id"] for one in found["nodes"] if one["label"] == record.label}
    held = [g for g in found["groups"] if record.head or any(b["node"] in mine for b in g["bundles"])]
    if held:
        names = "; ".join(f"{g['name']} ({_amount(g)}, {g['state'].lower()})" for g in held)
        what = "the cluster" if record.head else f"node {record.ip}"
        raise WorkerError(f"{what} of {record.address} is in use: {names}. Stop the run, or pass --force")
