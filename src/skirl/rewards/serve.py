"""``skirl serve-reward``: a reward file or the rule library as an HTTP service, for ``reward.services`` of a recipe.

    body (bounded) -> token -> JSON -> samples -> RewardPool -> scores

It listens on this machine only, wants a token, and bounds what it reads, unless told otherwise by name.
"""

import argparse
import asyncio
import contextlib
import errno
import ipaddress
import logging
import math
import os
import secrets
import signal
import socket
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import yaml
from pydantic import ValidationError

from skirl.config.rewards import RewardConfig
from skirl.errors import ConfigError, MissingExtra
from skirl.records import Group, RewardSample, ScoreFailure
from skirl.rewards.combine import Parts
from skirl.rewards.pool import RewardPool
from skirl.runtime.env import secret

if TYPE_CHECKING:
    from skirl.rewards.server_app import Scores

__all__ = ["configuration", "serve"]

logger = logging.getLogger(__name__)

TOKEN_VARIABLE = "SKIRL_REWARD_TOKEN"
TOKEN_FILE = Path("~/.skirl/reward_token")
MAX_REQUESTS = 512  # at once; more are answered 503, and the client comes back
STOP_S = 30  # in which requests under way may end
DESCRIPTION = f"""Serves a reward file, or terms of the rule library, over HTTP: POST /score, GET /health.

SOURCE is a Python file with reward(sample) or reward(batch), or a YAML file that holds the reward section of a recipe
(alone, or under the key reward). In the recipe that trains:

  reward: {{services: {{judge: {{urls: ["http://127.0.0.1:8100/score"], token_env: {TOKEN_VARIABLE}}}}}}}

Clients send the token as `Authorization: Bearer ...`. It is that of --token-file; without the flag, the environment
variable {TOKEN_VARIABLE}; without that, {TOKEN_FILE}, which is made when it is missing. It is never shown.
"""


def serve(argv: list[str]) -> int:
    """Runs the service until SIGINT or SIGTERM, then lets requests under way end. Returns 0.

    Args:
        argv: words after ``skirl serve-reward``.

    Raises:
        ConfigError: a flag, the file, the address or the token cannot be used.
        MissingExtra: the packages that serve are not installed.
    """
    options = _parser().parse_args(argv)
    if any(find_spec(name) is None for name in ("fastapi", "uvicorn")):
        raise MissingExtra(
            "skirl serve-reward needs the packages fastapi and uvicorn, which are not installed: "
            "run `pip install 'skirl[serve]'`"
        )
    import uvicorn

    from skirl.cli.console import setup_logging
    from skirl.rewards.server_app import make_app

    setup_logging()
    config = _section_served(options)
    token = _token(options)
    pool = RewardPool(config, _no_groups)
    with contextlib.closing(pool), _listening(options) as listener:
        pool.start()
        asyncio.run(pool.score_samples([]))  # refuses a function of whole groups now, not at the first request
        app = make_app(_weighted_scores(pool, config), token, options.max_body_mb * 2**20, _hosts(options))
        settings = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=MAX_REQUESTS,
            timeout_graceful_shutdown=STOP_S,
        )
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        logger.info("serving %s on http://%s:%d/score (%s)", _what(config), shown, port, _auth(options))
        with _quiet_signals():
            uvicorn.Server(settings).run(sockets=[listener])
        logger.info("stopped")
    return 0


# ------------------------------------------------------------------------------------------------------------ arguments
def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="skirl serve-reward",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("source", metavar="SOURCE", nargs="?", type=Path, help="Python file, or YAML reward section")
    parser.add_argument("--function", metavar="NAME", help="function in the Python file [reward]")
    parser.add_argument("--terms", metavar="KIND,...", help="terms of the rule library, with their defaults")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on [127.0.0.1]")
    parser.add_argument("--port", type=_port, default=8100, help="port to listen on; 0 picks a free one [8100]")
    parser.add_argument("--workers", type=int, metavar="N", help="processes that run rewards [2]")
    parser.add_argument("--timeout-s", type=float, metavar="S", help="deadline of one call [30]")
    parser.add_argument("--memory-mb", type=int, metavar="N", help="address space of a process [no limit]")
    parser.add_argument("--max-body-mb", type=_positive, default=16, metavar="N", help="largest request, MiB [16]")
    token = parser.add_mutually_exclusive_group()
    token.add_argument("--token-file", type=Path, metavar="PATH", help="file with the token, readable by you alone")
    token.add_argument("--no-token", action="store_true", help="ask for none; on a loopback address only")
    return parser


def _port(text: str) -> int:
    return _whole(text, 0, 65535)


def _positive(text: str) -> int:
    return _whole(text, 1, 4096)


def _whole(text: str, least: int, most: int) -> int:
    if not text.isdigit() or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most}")
    return int(text)


def configuration(argv: list[str]) -> RewardConfig:
    """What the words after ``skirl serve-reward`` would serve. Raises ConfigError."""
    return _section_served(_parser().parse_args(argv))


def _section_served(options: argparse.Namespace) -> RewardConfig:
    """The reward section that is served: of the YAML file, or made from the flags."""
    section: dict[str, Any] = {}
    if options.source is not None and options.source.suffix in {".yaml", ".yml"}:
        section = _section(options.source)
    elif options.source is not None:
        section = {"python": options.source}
    kinds = [kind.strip() for kind in options.terms.split(",")] if options.terms else []
    flags = {
        "function": options.function,
        "num_workers": options.workers,
        "timeout_s": options.timeout_s,
        "memory_mb": options.memory_mb,
        "terms": {**section.get("terms", {}), **{kind: kind for kind in kinds}} if kinds else None,
    }
    section |= {name: value for name, value in flags.items() if value is not None}
    try:
        config = RewardConfig.model_validate(section)
    except ValidationError as error:
        said = "; ".join(f"{'.'.join(map(str, one['loc'])) or 'reward'}: {one['msg']}" for one in error.errors())
        raise ConfigError(f"skirl serve-reward: {said}") from None
    if config.models:
        raise ConfigError(
            "skirl serve-reward: local reward models are part of a run: remove models from what is served"
        )
    if config.combine == "python":
        raise ConfigError(
            "skirl serve-reward: combine is for the recipe that trains: whoever asks gets every part; remove it here"
        )
    return config


def _section(path: Path) -> dict[str, Any]:
    try:
        written = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"skirl serve-reward: cannot read {path}: {error}") from None
    section = written.get("reward", written) if isinstance(written, dict) else None
    if not isinstance(section, dict):
        raise ConfigError(f"skirl serve-reward: {path} holds no reward section; write python: or terms: in it")
    return dict(section)


def _what(config: RewardConfig) -> str:
    served = [] if config.python is None else [f"{config.python.name}:{config.function}"]
    return ", ".join([*served, *config.terms, *config.services])


# ------------------------------------------------------------------------------------------------------ token and place
def _token(options: argparse.Namespace) -> str | None:
    if options.no_token:
        if not _is_loopback(options.host):
            raise ConfigError(
                f"--no-token with --host {options.host}: whoever reaches this machine could use the service. "
                "Listen on 127.0.0.1, or use a token."
            )
        return None
    if options.token_file is None and (token := secret(TOKEN_VARIABLE)):
        return _checked(token, TOKEN_VARIABLE)
    path = (options.token_file or TOKEN_FILE).expanduser()
    try:
        return _read_token(path) if path.exists() else _make_token(path)
    except OSError as error:
        raise ConfigError(f"the token file {path} cannot be used: {error.strerror}") from None


def _read_token(path: Path) -> str:
    if path.stat().st_mode & 0o077:
        raise ConfigError(f"the token file {path} can be read by others: run `chmod 600 {path}`, and change the token.")
    return _checked(path.read_text(encoding="utf-8").strip(), str(path))


def _checked(token: str, where: str) -> str:
    if len(token) < 16 or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"the token in {where} must be one word of at least 16 ASCII characters; it has {len(token)}."
        )
    return token


def _make_token(path: Path) -> str:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    token = secrets.token_urlsafe(32)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(token + "\n")
    logger.info("a new token is in %s; clients need it: export %s=$(cat %s)", path, TOKEN_VARIABLE, path)
    return token


def _auth(options: argparse.Namespace) -> str:
    if options.no_token:
        return "no token"
    if options.token_file is None and secret(TOKEN_VARIABLE):
        return f"token of {TOKEN_VARIABLE}"
    return f"token in {options.token_file or TOKEN_FILE}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _hosts(options: argparse.Namespace) -> list[str]:
    """Names that a request may call this service by: without a token, none that a web page could have made up."""
    return ["localhost", "127.0.0.1", "[::1]", options.host] if options.no_token else ["*"]


@contextlib.contextmanager
def _listening(options: argparse.Namespace) -> Iterator[socket.socket]:
    host, port = options.host, options.port
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        why = {errno.EADDRINUSE: "the port is in use", errno.EADDRNOTAVAIL: "this machine has no such address"}
        said = why.get(error.errno or 0, str(error))
        raise ConfigError(f"cannot listen on --host {host} --port {port}: {said}") from None
    if not _is_loopback(host):
        logger.warning("%s is open to other machines, and HTTP is not encrypted: put TLS or a tunnel before it", host)
    with listener:
        yield listener


@contextlib.contextmanager
def _quiet_signals() -> Iterator[None]:
    """uvicorn raises the signal that stopped it once more at its end; that is no error here."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda *_: None) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


# --------------------------------------------------------------------------------------------------------------- scores
def _no_groups(group: Group) -> NoReturn:
    raise AssertionError(f"a service scores samples, not groups: {group.prompt.id}")


def _weighted_scores(pool: RewardPool, config: RewardConfig) -> "Scores":
    """Scores of samples for the wire: each part times its weight, since who asks has one weight for the service."""

    async def scores(samples: Sequence[RewardSample]) -> list[Any]:
        results = await pool.score_samples(samples)
        return [_to_json(_weighted(result, pool), config.function) for result in results]

    return scores


def _weighted(result: Parts | ScoreFailure, pool: RewardPool) -> Parts | ScoreFailure:
    if isinstance(result, ScoreFailure):
        return result
    parts: Parts = {}
    for name, value in result.items():
        factor = pool.weight(name)
        numbers = [factor * one for one in (value if isinstance(value, tuple) else [value]) if one is not None]
        if not all(map(math.isfinite, numbers)):
            return ScoreFailure("not_finite", f"{factor:g} * {name} is not finite")
        parts[name] = tuple(numbers) if isinstance(value, tuple) else numbers[0] if numbers else None
    return parts


def _to_json(result: Parts | ScoreFailure, bare: str) -> Any:
    """One score for the wire. ``bare``: a part of this name, where it is the only one, is sent as a bare number."""
    if isinstance(result, ScoreFailure):
        return {"error": f"{result.kind}: {result.message}"}
    if set(result) == {bare} and isinstance(result[bare], float):
        return result[bare]
    return {name: list(value) if isinstance(value, tuple) else value for name, value in result.items()}
