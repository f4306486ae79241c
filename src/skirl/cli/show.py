"""``skirl show``: the resolved recipe, where each value came from, the loss, and what would run where."""

import json
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from skirl.config.check import Command, check
from skirl.config.describe import first_line, plain
from skirl.config.explain import loss_formula, processes
from skirl.config.load import Loaded, leaves
from skirl.config.schema import Config
from skirl.errors import ConfigError

__all__ = ["Report", "report", "show"]


@dataclass(frozen=True, slots=True)
class Report:
    """What ``skirl show`` knows of a recipe and a command; ``error`` is why it would not run."""

    loaded: Loaded
    command: Command
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    error: str | None


def report(loaded: Loaded, command: Command | None) -> Report:
    """Judges a recipe for a command; without one, for the first of train, sft, eval that it has a section for."""
    config = loaded.config
    if command is None:
        command = "train" if config.train is not None else "sft" if config.sft is not None else "eval"
    warnings, error = [], None
    try:
        warnings = check(config, command, loaded.provenance)
    except ConfigError as problem:
        error = str(problem)
    return Report(loaded, command, tuple(warnings), tuple(_missing_files(config)), error)


def _missing_files(config: Config) -> Iterator[str]:
    paths = {"model.path": config.model.path}
    paths |= {f"data.train.{name}.path": source.path for name, source in config.data.train.items()}
    paths |= {f"data.eval.{name}.path": source.path for name, source in config.data.eval.items()}
    if config.reward is not None and config.reward.python is not None:
        paths["reward.python"] = config.reward.python
    for name, path in paths.items():
        if not path.exists():
            yield f"{name}: there is no {path} yet"


def show(found: Report, console: Console, *, as_json: bool) -> None:
    """Prints the report, for people or as one JSON object."""
    if as_json:
        console.print(Text(json.dumps(_as_json(found), indent=2, ensure_ascii=False)), soft_wrap=True)
        return
    _settings(found, console)
    if found.command == "train":
        _method(found.loaded.config, console)
    _heading(console, f"skirl {found.command}: what runs where")
    _columns(console, processes(found.loaded.config, found.command))
    if found.notes or found.warnings:
        _heading(console, "notes")
        for line in (*found.notes, *(f"warning: {warning}" for warning in found.warnings)):
            console.print(Text(f"  {line}", style="yellow"), soft_wrap=True)


def _settings(found: Report, console: Console) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("setting", "value", "where from"):
        table.add_column(name, no_wrap=name == "setting", overflow="fold")
    section = ""
    for path, value in leaves(found.loaded.config):
        top = path.split(".")[0]
        if section and top != section:
            table.add_row()
        section = top
        origin = found.loaded.provenance[path]
        style = "dim" if origin == "default" else "cyan" if origin.startswith("preset") else "bold"
        table.add_row(Text(path, style=style), Text(plain(value), style=style), Text(origin, style=style))
    console.print(table)


def _method(config: Config, console: Console) -> None:
    method = config.method
    _heading(console, f"method: {method.preset}, as changed by this recipe")
    kl = method.kl
    rows = [
        ("advantage", f"{method.advantage.kind}: {first_line(type(method.advantage).__doc__)}"),
        ("policy_loss", f"{method.policy_loss.kind}: {first_line(type(method.policy_loss).__doc__)}"),
        ("kl", "none" if kl is None else f"{kl.estimator} in the {kl.where}, factor {plain(kl.coef)}"),
        ("normalizer", f"{method.normalizer.kind}: {first_line(type(method.normalizer).__doc__)}"),
        ("entropy_coef", plain(method.entropy_coef)),
        ("updates", f"{method.epochs} x {method.mini_batches} (epochs x mini_batches) optimizer steps a batch"),
    ]
    _columns(console, rows)
    _heading(console, "loss")
    _columns(console, loss_formula(config))


def _heading(console: Console, text: str) -> None:
    console.print()
    console.print(Text(text, style="bold"))


def _columns(console: Console, rows: list[tuple[str, str]]) -> None:
    table = Table(box=None, show_header=False, padding=(0, 0, 0, 2))
    table.add_column(no_wrap=False)
    table.add_column(no_wrap=False)
    for left, right in rows:
        table.add_row(Text(left), Text(right))
    console.print(table)


def _as_json(found: Report) -> dict[str, object]:
    config = found.loaded.config
    return {
        "recipe": str(found.loaded.recipe),
        "command": found.command,
        "config": config.model_dump(mode="json"),
        "provenance": dict(found.loaded.provenance),
        "loss": [line for line, _ in loss_formula(config)] if found.command == "train" else [],
        "processes": dict(processes(config, found.command)),
        "warnings": list(found.warnings),
        "notes": list(found.notes),
        "error": found.error,
    }
