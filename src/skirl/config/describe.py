"""The schema as data: what each setting accepts, in words. Messages, help texts, docs and the loader derive from it."""

import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from skirl.config.base import Frozen
from skirl.config.schema import Config

__all__ = ["Entry", "Setting", "Spec", "entries", "first_line", "nearest", "plain", "settings", "valid_paths"]

NAME = "<name>"


@dataclass(frozen=True, slots=True)
class Spec:
    """What a setting accepts.

    Attributes:
        words: the expectation in words: "a whole number >= 1".
        python_type: of a plain value; None for mappings and choices.
        models: the class of a section, or the classes of a choice.
        item: what a list, or a mapping of free names, holds.
        named: a mapping of free names.
        nullable: null is a value too.
        free: any value at all, mappings too; someone else checks it.
    """

    words: str
    python_type: type | None = None
    models: tuple[type[Frozen], ...] = ()
    item: "Spec | None" = None
    named: bool = False
    nullable: bool = False
    free: bool = False

    @property
    def variants(self) -> Mapping[str, type[Frozen]]:
        """Kind -> class; empty where the setting has no ``kind``."""
        return {kind: model for model in self.models if "kind" in model.model_fields for kind in kinds(model)}

    def child(self, key: str, kind: str | None) -> "Spec | None":
        """What the setting ``key`` inside accepts; of a choice of unknown kind, in the first variant with it."""
        if self.named:
            return self.item
        known = self.variants
        for model in self.models if kind is None or kind not in known else [known[kind]]:
            if key in settings(model):
                return settings(model)[key].spec
        return None


@dataclass(frozen=True, slots=True)
class Setting:
    """A field of a section; ``doc`` is its docstring."""

    spec: Spec
    required: bool
    default: Any
    doc: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of help: a setting, a section, or (``kind`` set) a variant of a choice."""

    path: str
    words: str
    default: str
    doc: str
    kind: str | None = None
    section: bool = False


@cache
def settings(model: type[Frozen]) -> Mapping[str, Setting]:
    """The fields of a section, in order."""
    result: dict[str, Setting] = {}
    for name, field in model.model_fields.items():
        spec = _spec(field.annotation, field.metadata)
        default = None if field.is_required() else field.get_default(call_default_factory=False)
        result[name] = Setting(spec, field.is_required(), default, field.description or "")
    return result


def kinds(model: type[Frozen]) -> tuple[str, ...]:
    """Names that the ``kind`` of a class may have."""
    return get_args(model.model_fields["kind"].annotation)


def plain(value: Any) -> str:
    """A value as it would stand in a recipe."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(plain(item) for item in cast(Sequence[Any], value)) + "]"
    if isinstance(value, Frozen):
        kind: Any = dict(value).get("kind")
        return str(kind) if kind is not None else "{...}"
    if isinstance(value, Mapping):
        return "{...}" if value else "{}"
    return str(value)


def first_line(doc: str | None) -> str:
    """The first paragraph of a docstring, as one line."""
    return " ".join((doc or "").strip().split("\n\n")[0].split())


# ------------------------------------------------------------------------------------------------------- types in words
def _spec(annotation: Any, metadata: Sequence[Any] = ()) -> Spec:
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *more = get_args(annotation)
        nested = [item for extra in more for item in (extra.metadata if isinstance(extra, FieldInfo) else [extra])]
        return _spec(inner, [*metadata, *nested])
    if origin in (Union, types.UnionType):
        return _union(get_args(annotation), metadata)
    if origin is not None:
        return _container(origin, get_args(annotation))
    if annotation is Any:
        return Spec("any value", free=True)
    if issubclass(annotation, Frozen):
        return _section((annotation,))
    return Spec(_scalar(annotation, metadata), python_type=annotation)


def _container(origin: Any, args: Sequence[Any]) -> Spec:
    if origin is Literal:
        return Spec(_one_of([str(choice) for choice in args]), python_type=str)
    if origin is dict:
        item = _spec(args[1])
        return Spec("a mapping of names, each " + item.words, item=item, named=True)
    assert origin is tuple, f"the schema has a type that is not described: {origin}"
    item = _spec(args[0])
    return Spec(
        f"a list{'' if args[-1] is Ellipsis else f' of {len(args)}'}, each {item.words}", python_type=tuple, item=item
    )


def _union(members: Sequence[Any], metadata: Sequence[Any]) -> Spec:
    rest = [member for member in members if member is not type(None)]
    if len(rest) == 1:
        spec = _spec(rest[0], metadata)
    else:
        spec = _section(tuple(model for member in rest for model in _spec(member).models))
    if len(rest) == len(members):
        return spec
    return Spec(spec.words + ", or null", spec.python_type, spec.models, spec.item, spec.named, nullable=True)


def _section(models: tuple[type[Frozen], ...]) -> Spec:
    names = [kind for model in models if "kind" in model.model_fields for kind in kinds(model)]
    if names:
        return Spec(_one_of(names), models=models)
    return Spec("a mapping with " + ", ".join(models[0].model_fields), models=models)


def _one_of(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else "one of " + ", ".join(names)


def _scalar(annotation: Any, metadata: Sequence[Any]) -> str:
    nouns = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Path: "a path"}
    low, high = "", ""
    inclusive: dict[str, Any] = {}
    for bound in metadata:
        if isinstance(bound, Ge):
            low, inclusive["low"] = f" >= {bound.ge}", bound.ge
        elif isinstance(bound, Gt):
            low = f" > {bound.gt}"
        elif isinstance(bound, Le):
            high, inclusive["high"] = f" <= {bound.le}", bound.le
        elif isinstance(bound, Lt):
            high = f" < {bound.lt}"
    if len(inclusive) == 2:
        return f"{nouns[annotation]} from {inclusive['low']} to {inclusive['high']}"
    return nouns[annotation] + low + (" and" if low and high else "") + high


# -------------------------------------------------------------------------------------------------- the whole, as lines
def entries() -> Iterator[Entry]:
    """Every section, setting and variant of a recipe, in the order of the schema."""
    yield from _entries(Config, "", {})


def _entries(model: type[Frozen], prefix: str, defaults: Mapping[str, Any]) -> Iterator[Entry]:
    flat_first = sorted(settings(model).items(), key=lambda item: _is_nested(item[1].spec))
    for name, setting in flat_first:
        spec, path = setting.spec, prefix + name
        if name == "kind" and len(kinds(model)) == 1:
            continue  # the variant's own line says it
        value = defaults.get(name, setting.default)
        default = "required" if setting.required else plain(value)
        if not _is_nested(spec):
            yield Entry(path, spec.words, default, setting.doc)
            continue
        if spec.named and spec.item:
            spec, path, value = spec.item, f"{path}.{NAME}", None
            default = "none"
        yield from _inside(spec, path, value, Entry(path, spec.words, default, setting.doc))


def _is_nested(spec: Spec) -> bool:
    return bool(spec.models) or (spec.named and spec.item is not None and bool(spec.item.models))


def _inside(spec: Spec, path: str, value: Any, head: Entry) -> Iterator[Entry]:
    if not spec.variants or (len(spec.models) == 1 and len(spec.variants) > 1):
        given = dict(value) if isinstance(value, spec.models[0]) else {}
        words = "section, or null" if spec.nullable else "section"
        yield Entry(path, words, head.default if spec.nullable else "", head.doc, section=True)
        yield from _entries(spec.models[0], path + ".", given)
        return
    yield head
    for kind, model in spec.variants.items():
        given = dict(value) if isinstance(value, model) else {}
        yield Entry(path, "", "", first_line(model.__doc__), kind=kind)
        yield from _entries(model, path + ".", given)


@cache
def valid_paths() -> tuple[str, ...]:
    """Every path that a recipe may set; ``<name>`` stands for a free name."""
    paths = [entry.path for entry in entries()]
    paths += [f"{entry.path}.kind" for entry in entries() if entry.kind]
    return tuple(dict.fromkeys(paths))


def nearest(path: str) -> str | None:
    """The valid path most like a wrong one: its last name counts for 0.6, the section for 0.4.

    Where no name is alike, the first setting whose docstring says the name: learning_rate finds trainer.optim.lr. Of
    equals, those of training come before those of the offline commands and the critic.
    """
    section, _, last = path.rpartition(".")
    best, best_score = None, 0.0
    for candidate in sorted((_with_names(valid, path) for valid in valid_paths()), key=_is_rarer):
        parent, _, name = candidate.rpartition(".")
        likeness = _likeness(last, name, parent)
        score = 0.6 * likeness + 0.4 * _section_likeness(section, parent)
        if likeness >= 0.6 and score > best_score:
            best, best_score = candidate, score
    if best is not None:
        return best
    said = last.replace("_", " ").replace("-", " ")
    ordered = sorted(entries(), key=lambda entry: _is_rarer(entry.path))
    return next((entry.path for entry in ordered if len(said) >= 8 and said in entry.doc.lower()), None)


def _is_rarer(path: str) -> bool:
    """Sections that most recipes do not have."""
    return path.split(".")[0] in ("sft", "rm", "dpo", "kd", "prm", "sample", "critic")


def _likeness(wrong: str, name: str, parent: str) -> float:
    """Of two last names; kl_coef is the coef of a section kl, and clip_high at least somebody's high."""
    front, _, end = wrong.rpartition("_")
    if front and end == name:
        return 0.95 if parent.rpartition(".")[2] == front else 0.8
    return _alike(wrong, name)


def _section_likeness(wrong: str, parent: str) -> float:
    if wrong == parent:
        return 1.0
    return 0.6 if wrong and parent.startswith(wrong + ".") else _alike(wrong, parent)


def _with_names(valid: str, path: str) -> str:
    """``data.train.<name>.path`` with the free name that stands in ``path``, where the front agrees."""
    front, mark, rest = valid.partition("." + NAME)
    given = path.removeprefix(front + ".").split(".")[0] if path.startswith(front + ".") else ""
    return f"{front}.{given}{rest}" if mark and given else valid


def _alike(left: str, right: str) -> float:
    return SequenceMatcher(None, left, right, autojunk=False).ratio()
