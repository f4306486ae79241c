"""``skirl show``: the resolved recipe, where each value came from, the loss, and what would run where."""

import json
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from skirl.config.check import Command, check
from skirl.config.describe import first_line, plain
from skirl.config.explain import processes
from skirl.config.formula import loss_formula
from skirl.config.load import Loaded, leaves
from skirl.config.schema import Config
from skirl.errors import ConfigError

__all__ = ["Report", "report", "show"]

OWN_SECTIONS: tuple[Command, ...] = ("train", "sft", "dpo", "rm", "prm", "kd", "sample")
"""Commands with a section of their name."""


@dataclass(frozen=True, slots=True)
class Report:
    """What ``skirl show`` knows of a recipe and a command; ``error`` is why it would not run."""

    loaded: Loaded
    command: Command
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    error: str | None


def report(loaded: Loaded, command: Command | None) -> Report:
    """Judges a recipe for a command; without one, for the first that it has a section for, else for eval."""
    config = loaded.config
    if command is None:
        command = _first_command(config)
    warnings, error = [], None
    try:
        warnings = check(config, command, loaded.provenance)
    except ConfigError as problem:
        error = str(problem)
    return Report(loaded, command, tuple(warnings), tuple(_missing_files(config)), error)


def _first_command(config: Config) -> Command:
    for name in OWN_SECTIONS:
        if dict(config)[name] is not None:
            return name
    return "eval"


def _missing_files(config: Config) -> Iterator[str]:
    paths = {"model.path": config.model.path}
    paths |= {f"data.train.{name}.path": source.path for name, source in config.data.train.items()}
    paths |= {f"data.eval.{name}.path": source.path for name, source in config.data.eval.items()}
    if config.reward is not None and config.reward.python is not None:
        paths["reward.python"] = config.reward.python
    if config.reward is not None:
        paths |= {f"reward.models.{name}.path": model.path for name, model in config.reward.models.items()}
    if config.critic is not None and config.critic.path is not None:
        paths["critic.path"] = config.critic.path
    if config.kd is not None:
        paths["kd.teacher"] = config.kd.teacher
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
        if not _is_used(found, top, value):
            continue
        if section and top != section:
            table.add_row()
        section = top
        origin = found.loaded.provenance[path]
        style = "dim" if origin == "default" else "cyan" if origin.startswith("preset") else "bold"
        table.add_row(Text(path, style=style), Text(plain(value), style=style), Text(origin, style=style))
    console.print(table)


def _is_used(found: Report, section: str, value: object) -> bool:
    """Sections of other commands, and those that the recipe does not have, are left out."""
    if section in OWN_SECTIONS:
        return section == found.command
    if section in ("method", "critic"):
        return found.command == "train" and (section == "method" or value is not None)
    return section != "reward" or found.command in ("train", "sample")


def _method(config: Config, console: Console) -> None:
    method = config.method
    _heading(console, f"method: {method.preset}, as changed by this recipe")
    kl = method.kl
    rows = [
        ("advantage", f"{method.advantage.kind}: {first_line(type(method.advantage).__doc__)}"),
        ("policy_loss", f"{method.policy_loss.kind}: {first_line(type(method.policy_loss).__doc__)}"),
        ("kl", "none" if kl is None else f"{kl.estimator} in the {kl.where}, factor {plain(kl.coef)}"),
        ("normalizer", f"{method.normalizer.kind}: {first_line(type(method.normalizer).__doc__)}"),
        *_optional_parts(config),
        ("entropy_coef", plain(method.entropy_coef)),
        ("updates", f"{method.epochs} x {method.mini_batches} (epochs x mini_batches) optimizer steps a batch"),
    ]
    _columns(console, rows)
    _heading(console, "loss")
    _columns(console, loss_formula(config))


def _optional_parts(config: Config) -> list[tuple[str, str]]:
    """Parts that many methods do without."""
    method, found = config.method, list[tuple[str, str]]()
    if method.correction is not None:
        text = first_line(type(method.correction).__doc__)
        found.append(("correction", f"{method.correction.kind}: {text}"))
    shaping = [name for name, value in method.shaping if value is not None]
    if shaping:
        found.append(("shaping", ", ".join(shaping)))
    if method.dynamic_sampling is not None:
        keep = method.dynamic_sampling.keep
        found.append(("dynamic sampling", f"{keep.kind}: {first_line(type(keep).__doc__)}"))
    if config.critic_in_use is not None:
        clip = plain(config.critic_in_use.value_clip)
        found.append(("critic", f"value_clip {clip}, warm-up of {config.critic_in_use.warmup_steps} steps"))
    if method.old_policy != "trainer":
        found.append(("old policy", "the engine's log-probs (method.old_policy)"))
    return found


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
