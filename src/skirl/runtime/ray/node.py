"""This machine's part of a Ray cluster: one ``ray start --block`` process with everything below it in a session.

start_node() -> the process, its log, a record in the directory -> stop_node(): that session's processes and no others

``ray stop`` ends every Ray process of the machine, also those of other clusters; the record is what makes it
possible to end one node. Nothing here imports Ray.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from skirl.errors import ConfigError, WorkerError

__all__ = [
    "LABEL",
    "NodeRecord",
    "default_directory",
    "forget",
    "is_running",
    "ray_executable",
    "records",
    "save",
    "start_node",
    "stop_node",
    "tail",
    "wait_for_answer",
    "wait_for_port",
]

LABEL = "skirl-node"
"""Ray label that tells the nodes started here apart, also where several share a machine."""
READY = "Ray runtime started."
DEFAULT_CLIENT_PORT = 10001
LONGEST_DIRECTORY = 40
"""Ray puts sockets below it, and Linux allows 107 bytes for their paths."""


@dataclass(frozen=True)
class NodeRecord:
    """A node that was started on this machine.

    Attributes:
        address: of the cluster's head, HOST:PORT. ip: of this node.
        pid, born: the ``ray start`` process and its start, in clock ticks since boot: together they name one process.
        label: value of Ray's label ``LABEL`` on this node.
        dashboard: URL, None where there is none. hosts: machines that were started from here by ssh.
    """

    address: str
    ip: str
    pid: int
    born: int
    head: bool
    label: str
    log: str
    dashboard: str | None
    hosts: tuple[str, ...] = ()


# ---------------------------------------------------------------------------------------------------------------- files
def default_directory() -> Path:
    """Where this user's nodes keep their sessions and records: on a disk of this machine."""
    return Path(tempfile.gettempdir()) / f"skirl-cluster-{os.getuid()}"


def _prepare(directory: Path) -> Path:
    directory = directory.absolute()
    if len(str(directory)) > LONGEST_DIRECTORY:
        raise ConfigError(
            f"--temp-dir {directory}: {len(str(directory))} characters; Ray's sockets lie below it and Linux limits "
            f"their paths, so at most {LONGEST_DIRECTORY}: take a shorter one, on a disk of this machine"
        )
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if directory.stat().st_uid != os.getuid():
        raise ConfigError(f"--temp-dir {directory} belongs to another user (id {directory.stat().st_uid})")
    return directory


def records(directory: Path) -> list[NodeRecord]:
    """Nodes started here that still run, oldest first. Records of nodes that ended are deleted."""
    found = []
    for file in directory.glob("node-*.json"):
        with suppress(FileNotFoundError):  # its node ended, and another call was quicker
            status = file.stat()
            if status.st_uid != os.getuid():
                continue
            record = _read(file)
            if record is not None and is_running(record):
                found.append((status.st_mtime, record))
            else:
                file.unlink()
    return [record for _, record in sorted(found, key=lambda one: one[0])]


def _read(file: Path) -> NodeRecord | None:
    """None where the machine stopped before all of it was on the disk; its node is gone as well."""
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        return NodeRecord(**{**raw, "hosts": tuple(raw["hosts"])})
    except (KeyError, TypeError, ValueError):
        return None


def save(record: NodeRecord, directory: Path) -> None:
    """Writes the record, so that another call finds the node."""
    file = _file(record, directory)
    aside = file.with_suffix(".tmp")
    aside.write_text(json.dumps(asdict(record), indent=1), encoding="utf-8")
    aside.replace(file)


def forget(record: NodeRecord, directory: Path) -> None:
    """Deletes the record."""
    _file(record, directory).unlink(missing_ok=True)


def _file(record: NodeRecord, directory: Path) -> Path:
    return directory / f"node-{record.pid}.json"


# ---------------------------------------------------------------------------------------------------------------- start
def ray_executable() -> Path:
    """``ray`` of this Python environment."""
    beside = Path(sys.executable).parent / "ray"
    if beside.exists():
        return beside
    raise ConfigError(
        f"no `ray` beside {sys.executable}: Ray is not installed in this Python environment; install skirl in it "
        "(pip install skirl), or run the skirl of the environment that has it"
    )


def start_node(
    directory: Path, *, port: int | None, address: str | None, arguments: Sequence[str], timeout_s: float
) -> NodeRecord:
    """Starts a head (``port``) or a worker node that joins ``address``, and waits until it has come up.

    Args:
        directory: for Ray's session and the record.
        port: of the head; 0 takes a free one.
        arguments: further words for ``ray start``.
        timeout_s: deadline, seconds.

    Raises:
        ConfigError: the port is taken, or Ray is not installed here.
        WorkerError: the node did not come up; with the end of its log.
    """
    ray, directory = ray_executable(), _prepare(directory)
    label = uuid.uuid4().hex[:12]
    words = [str(ray), "start", *(["--address", address] if address else ["--head", "--port", str(port)])]
    words += ["--block", "--disable-usage-stats", "--temp-dir", str(directory), "--labels", f"{LABEL}={label}"]
    words += ["--log-style", "record", "--log-color", "false", *_defaults(address is None, arguments), *arguments]
    log = directory / f"node-{label}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True)
    record = NodeRecord(address or "", "", process.pid, _born(process.pid), address is None, label, str(log), None)
    try:
        record = _wait_until_up(record, process, timeout_s)
    except BaseException:  # fence: also after Ctrl-C nothing stays behind
        stop_node(record)
        process.wait(5.0)
        raise
    save(record, directory)
    return record


def _defaults(is_head: bool, given: Sequence[str]) -> Iterator[str]:
    flags = {word.partition("=")[0] for word in given}
    if "--num-cpus" not in flags and len(os.sched_getaffinity(0)) != os.cpu_count():
        yield f"--num-cpus={len(os.sched_getaffinity(0))}"  # Ray counts the machine's cores, a scheduler gave fewer
    if is_head and "--dashboard-host" not in flags:
        yield "--dashboard-host=127.0.0.1"
    if is_head and "--ray-client-server-port" not in flags and not _is_free(DEFAULT_CLIENT_PORT):
        yield f"--ray-client-server-port={_free_port()}"  # another head has it; Ray would end this one


def _wait_until_up(record: NodeRecord, process: subprocess.Popen[bytes], timeout_s: float) -> NodeRecord:
    end = time.monotonic() + timeout_s
    while True:
        ended = process.poll()
        text = Path(record.log).read_text(encoding="utf-8", errors="replace")
        if ended is None and READY in text and (found := _read_log(record, text)) is not None:
            return found
        what = None
        if ended is not None:
            what = f"`ray start` ended with exit code {ended}"
        elif time.monotonic() > end:
            what = f"the node did not come up within {timeout_s:g} s (--timeout)"
        if what:
            where = f" of {record.address}" if record.address else ""
            raise WorkerError(f"no node{where} on {socket.gethostname()}: {what}; the end of its log:\n{tail(text)}")
        time.sleep(0.2)


def _read_log(record: NodeRecord, text: str) -> NodeRecord | None:
    ip = re.search(r"Local node IP: (\S+)", text)
    address = re.search(r"ray start --address='([^']+)'", text)
    if ip is None or (record.head and address is None):
        return None  # not written whole yet
    dashboard = re.search(r"RAY_API_SERVER_ADDRESS='([^']+)'", text)
    return replace(
        record,
        ip=ip[1],
        address=address[1] if record.head and address else record.address,
        dashboard=dashboard[1] if record.head and dashboard else None,
    )


def tail(text: str, num_lines: int = 15) -> str:
    """The last lines of a log, indented."""
    return "\n".join(f"  {line}" for line in text.strip().splitlines()[-num_lines:]) or "  (empty)"


# ---------------------------------------------------------------------------------------------------------------- ports
def wait_for_port(port: int, timeout_s: float = 0.0) -> None:
    """Raises ConfigError where a server on this machine has the port; 0 is always free."""
    end = time.monotonic() + timeout_s
    while port and not _is_free(port):
        if time.monotonic() >= end:
            raise ConfigError(
                f"--port {port} is in use on {socket.gethostname()} (6379 is Ray's, and Redis's); "
                "`skirl cluster status` shows what was started here; take another one, or --port 0 for any free one"
            )
        time.sleep(0.2)


def wait_for_answer(address: str, timeout_s: float) -> None:
    """Waits until something accepts connections at HOST:PORT.

    Raises:
        ConfigError: the address is malformed, or nothing answers within the deadline.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"--address {address!r} is not HOST:PORT, such as 10.0.0.1:6379")
    end = time.monotonic() + timeout_s
    while True:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=5.0):
                return
        except OSError as error:
            if time.monotonic() >= end:
                raise ConfigError(
                    f"nothing answers at --address {address} within {timeout_s:g} s (--timeout): {error}; is the head "
                    "up (`skirl cluster status` there), is this the address it printed, does a firewall block the port?"
                ) from error
        time.sleep(0.2)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


# ----------------------------------------------------------------------------------------------------------------- stop
def is_running(record: NodeRecord) -> bool:
    """Whether it is still the process that was started, and not another one with its number."""
    return record.pid in _alive({record.pid}) and _born(record.pid) == record.born


def stop_node(record: NodeRecord, grace_s: float = 20.0) -> int:
    """Ends the node: ``ray start`` takes its children along; what is left after the grace time is killed.

    Returns: number of processes that had to be killed.
    """
    end, asked = time.monotonic() + grace_s, set[int]()
    while (left := _session(record)) and time.monotonic() < end:
        for pid in [record.pid] if record.pid in left else left:  # the leader first: it ends the others in order
            if pid not in asked:
                _send(pid, signal.SIGTERM)
                asked.add(pid)
        time.sleep(0.1)
    for pid in left:
        _send(pid, signal.SIGKILL)
    return len(left)


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _session(record: NodeRecord) -> list[int]:
    """Processes of the node's session; none of them is older than the node (a reused number is no match)."""
    return [pid for pid, (session, born) in _processes().items() if session == record.pid and born >= record.born]


def _alive(pids: set[int]) -> set[int]:
    return pids & _processes().keys()


def _born(pid: int) -> int:
    return _processes().get(pid, (0, 0))[1]


def _processes() -> dict[int, tuple[int, int]]:
    """pid -> (session, start in clock ticks) of every process that is not a zombie."""
    found = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = file.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:  # ended meanwhile
            continue
        if fields and fields[0] != "Z":
            found[int(file.parent.name)] = (int(fields[3]), int(fields[19]))
    return found
