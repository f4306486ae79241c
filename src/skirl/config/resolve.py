"""Checks what was written against the schema, and turns each problem into a line that says what to do."""

import math
import os
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic_core import ErrorDetails

from skirl.config.base import Frozen
from skirl.config.describe import Spec, first_line, nearest, plain, settings
from skirl.config.schema import Config
from skirl.config.written import Written

__all__ = ["Resolver"]

_FREE_NAME = re.compile(r"[A-Za-z0-9_-]+")


class Resolver:
    """Walks the written values along the schema; what is wrong goes to ``problems`` and is left out of the result."""

    def __init__(self, recipe: str, written: Written, problems: list[str]) -> None:
        self.recipe = recipe
        self.written = written
        self.problems = problems
        self.reported: set[str] = set()  # paths with a problem already; they are left out of the result
        self.gaps: set[str] = set()  # sections in which a name was unknown
        self.hinted: set[str] = set()  # paths that an unknown name was probably meant to be

    def section(self, path: str, values: Mapping[str, Written], model: type[Frozen]) -> dict[str, Any]:
        """The plain values of a section, ready for validation."""
        known = settings(model)
        result: dict[str, Any] = {}
        for name, value in values.items():
            here = f"{path}.{name}" if path else name
            if name not in known:
                self.unknown(here, value, f"{path or 'a recipe'} has: {', '.join(known)}")
                continue
            found = self.value(here, value, known[name].spec, known[name].default)
            if here not in self.reported:
                result[name] = found
        return result

    def value(self, path: str, written: Written, spec: Spec, default: Any) -> Any:
        """The plain value of one setting."""
        if spec.free:
            return _as_plain(written)
        if written.mapping is None:
            return self.leaf(path, written, spec)
        if spec.named and spec.item:
            return self.names(path, written.mapping, spec.item)
        if spec.variants:
            return self.choice(path, written, spec, default)
        if spec.models:
            return self.section(path, written.mapping, spec.models[0])
        if written.where.startswith("--"):
            self.unknown(f"{path}.{next(iter(written.mapping))}", next(iter(written.mapping.values())), "")
            self.reported.add(path)
        return {}  # a mapping where plain data belongs: reported by validation

    def names(self, path: str, values: Mapping[str, Written], item: Spec) -> dict[str, Any]:
        """A mapping of free names."""
        result: dict[str, Any] = {}
        for name, value in values.items():
            here = f"{path}.{name}"
            if not _FREE_NAME.fullmatch(name):
                self.report(here, value.where, f"{path} has an entry named {name!r}; use letters, digits, - and _.")
                continue
            found = self.value(here, value, item, None)
            if here not in self.reported:
                result[name] = found
        return result

    def choice(self, path: str, written: Written, spec: Spec, default: Any) -> Any:
        """A mapping with a ``kind``; a kind that is left out is the default's."""
        values = written.mapping or {}
        known = spec.variants
        if "kind" in values:
            kind, origin = values["kind"].value, values["kind"].where
        elif isinstance(default, Frozen):
            kind, origin = dict(default)["kind"], "the default"
        else:
            self.report(path, written.where, f"{path} names no kind; set {path}.kind to {spec.words}.")
            return None
        if not isinstance(kind, str) or kind not in known:
            self.report(path, values["kind"].where, _must_be(path, kind, spec.words))
            return None
        own = settings(known[kind])
        inside: dict[str, Written] = {}
        for name, value in values.items():
            others = [other for other, model in known.items() if name not in own and name in settings(model)]
            if others:
                text = f"{path}.{name} belongs to kind {' or '.join(others)}, but {path} is {kind} ({origin})"
                remedy = f"set {path}.kind to {others[0]}, or remove {path}.{name}."
                self.report(f"{path}.{name}", value.where, f"{text}; {remedy}")
            else:
                inside[name] = value
        return {"kind": kind, **self.section(path, inside, known[kind])}

    def leaf(self, path: str, written: Written, spec: Spec) -> Any:
        """Plain data. Validation would take true for 1 and an empty path for the working directory; this does not."""
        value: Any = written.value
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if written.alone and spec.python_type is not bool:
            self.report(path, written.where, f"{path} has no value; write {written.where} VALUE ({spec.words}).")
        elif (
            (isinstance(value, bool) and spec.python_type in (int, float))
            or (number and spec.python_type is bool)
            or (value == "" and spec.python_type in (Path, str))
        ):
            self.mismatch(path, value, spec)
        elif spec.python_type is Path and isinstance(value, str):
            return os.path.expanduser(value)
        return value

    # ------------------------------------------------------------------------------------------------------- messages
    def report(self, path: str, where: str, text: str) -> None:
        """One problem; nothing more is said about the same path."""
        self.reported.add(path)
        self.problems.append(f"{where}: {text}")

    def unknown(self, path: str, written: Written, siblings: str) -> None:
        """A name that the schema does not have."""
        hint = nearest(path)
        flag = "--" if written.where.startswith("--") else ""
        name = path.rpartition(".")[2]
        self.gaps.add(path.rpartition(".")[0])
        if hint == path:
            advice = "names with dots are for flags; in a file, nest them."
        elif hint:
            self.hinted.add(hint)
            advice = f"did you mean {flag}{hint}?"
        else:
            advice = siblings or f"{path.removesuffix('.' + name)} takes no settings of its own"
        self.problems.append(f"{written.where}: there is no setting {path}; {advice}" + ("" if hint else "."))

    def unknown_in_list(self, path: str, section: Spec) -> None:
        """The same in an entry of a list, which is plain data until validation."""
        inside, _, name = path.rpartition(".")
        known = list(settings(section.models[0]))
        close = get_close_matches(name, known, n=1)
        self.hinted |= {f"{inside}.{hint}" for hint in close}
        advice = f"did you mean {close[0]}?" if close else f"{inside} has: {', '.join(known)}."
        self.report(path, self.where(path), f"there is no setting {path}; {advice}")

    def mismatch(self, path: str, value: Any, spec: Spec) -> None:
        """A value of the wrong type or out of bounds."""
        words = spec.words
        if isinstance(value, float) and not math.isfinite(value):
            words = words.replace("a number", "a finite number")
        if spec.python_type in (str, Path) and isinstance(value, (int, float)):
            words += f"; put it in quotes: {plain(value)!r}" if not isinstance(value, bool) else ""
        self.report(path, self.where(path), _must_be(path, value, words) + _doc(path))

    def explain(self, errors: Sequence[ErrorDetails]) -> None:
        """Validation's errors in the recipe's own terms; consequences of a problem already told are left out."""
        for error in sorted(errors, key=lambda error: error["type"] != "extra_forbidden"):
            path, spec = _path(error["loc"])
            if self.told(path, error["type"]):
                continue
            if error["type"] == "extra_forbidden":
                self.unknown_in_list(path, spec)
            elif error["type"] == "missing":
                self.report(path, self.where(path), f"{path} is missing; {_needs(path, spec)}.{_doc(path)}")
            elif error["type"] == "value_error":
                cause = error.get("ctx", {}).get("error", error["msg"])
                self.report(path, self.where(path), f"{path} {cause}.")
            else:
                self.mismatch(path, error["input"], spec)

    def told(self, path: str, kind: str) -> bool:
        """Whether an error follows from one that was reported."""
        if kind == "missing" and path in self.hinted:
            return True
        if kind == "value_error" and path in self.gaps:
            return True
        return path.split("[")[0] in self.reported

    def where(self, path: str) -> str:
        """Where the value of a path, or the nearest section around it, was written."""
        written, found = self.written, self.recipe
        for name in path.split("[")[0].split("."):
            if written.mapping is None or name not in written.mapping:
                break
            written = written.mapping[name]
            found = written.where
        return found


def _as_plain(written: Written) -> Any:
    """A value of any form as it was written; a flag that stands alone is true."""
    if written.mapping is not None:
        return {name: _as_plain(value) for name, value in written.mapping.items()}
    return True if written.alone else written.value


def _path(loc: tuple[int | str, ...]) -> tuple[str, Spec]:
    """Validation's location as a dotted path, without the kinds that it puts between."""
    spec, path = Spec("a recipe", models=(Config,)), ""
    kind: str | None = None
    for part in loc:
        if isinstance(part, int):
            path, spec = f"{path}[{part}]", spec.item or spec
        elif len(spec.models) > 1 and kind is None:
            kind = part
        else:
            path = f"{path}.{part}" if path else part
            spec, kind = spec.child(part, kind) or spec, None
    return path, spec


def _doc(path: str) -> str:
    spec, doc = Spec("a recipe", models=(Config,)), ""
    for name in path.split("[")[0].split("."):
        doc = next((settings(model)[name].doc for model in spec.models if name in settings(model)), "")
        spec = spec.child(name, None) or spec
    return f" ({first_line(doc).rstrip('.')}.)" if doc else ""


def _got(value: Any) -> str:
    if isinstance(value, str):
        return repr(value)
    return "a mapping" if isinstance(value, dict) else plain(value)


def _needs(path: str, spec: Spec) -> str:
    required = [
        f"{path}.{name}" for model in spec.models[:1] for name, item in settings(model).items() if item.required
    ]
    return f"it needs at least {', '.join(required)}" if required and not spec.variants else f"it must be {spec.words}"


def _must_be(path: str, value: Any, words: str) -> str:
    choices = words.rpartition("one of ")[2].removesuffix(", or null").split(", ") if "one of " in words else []
    close = get_close_matches(value, choices, n=1) if isinstance(value, str) else []
    return f"{path} is {_got(value)}; it must be {words}" + (f"; did you mean {close[0]}?" if close else ".")
