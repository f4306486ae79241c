"""What the user wrote, with where each value stands: YAML files that inherit, and dotted flags."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from skirl.errors import ConfigError

__all__ = ["Written", "read_files", "read_flags"]

_TAG = "tag:yaml.org,2002:"


@dataclass(frozen=True, slots=True)
class Written:
    """A value as written: a mapping is a dict of further ``Written``, anything else is plain data.

    Attributes:
        where: "file:line" of the key, "--flag", or "preset name".
        alone: a flag without a value.
    """

    value: Any
    where: str
    alone: bool = False

    @property
    def mapping(self) -> "dict[str, Written] | None":
        """The further values, or None where this is plain data."""
        value: object = self.value
        return cast("dict[str, Written]", value) if isinstance(value, dict) else None


_SCALARS = {
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "null": (r"~|null|Null|NULL|", "~nN"),
    "int": (r"[-+]?(?:0|[1-9][0-9_]*)", "-+0123456789"),
    "float": (
        r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|nan)",
        "-+.0123456789",
    ),
}


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """In PyYAML's form: first character -> [(tag, pattern)]."""
    result: dict[str, list[tuple[str, re.Pattern[str]]]] = {"": [(_TAG + "null", re.compile("$"))]}
    for kind, (pattern, firsts) in _SCALARS.items():
        for first in firsts:
            result.setdefault(first, []).append((_TAG + kind, re.compile(f"(?:{pattern})$")))
    return result


class _Loader(yaml.SafeLoader):
    """YAML 1.2's core scalars: 1e-6 is a number; yes, no, on and off are text; dates and 1:30 are text."""

    yaml_implicit_resolvers = _resolvers()


# ---------------------------------------------------------------------------------------------------------------- files
def read_files(recipe: Path, problems: list[str]) -> list[Written]:
    """The recipe and all that it inherits, the lowest first.

    Raises:
        ConfigError: a file that is missing or no YAML, or files that inherit one another in a circle.
    """
    return list(_layers(recipe, (), problems))


def _layers(path: Path, chain: tuple[Path, ...], problems: list[str]) -> Iterator[Written]:
    path = Path(os.path.normpath(path))
    if path in chain:
        circle = " -> ".join(str(link) for link in (*chain[chain.index(path) :], path))
        raise ConfigError(f"{chain[-1]}: recipes inherit one another in a circle: {circle}. Remove one of the links.")
    content = _read(path, problems)
    parents = content.pop("inherits", None)
    for parent in _parents(parents) if parents else ():
        file = path.parent / parent
        if parents and not file.is_file():
            raise ConfigError(f"{parents.where}: inherits {parent}, but there is no file {os.path.normpath(file)}.")
        yield from _layers(file, (*chain, path), problems)
    yield Written(content, str(path))


def _parents(written: Written) -> list[str]:
    names = [written.value] if isinstance(written.value, str) else written.value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in cast(list[Any], names)):
        raise ConfigError(f"{written.where}: inherits must be a file name or a list of file names.")
    return cast(list[str], names)


def _read(path: Path, problems: list[str]) -> dict[str, Written]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such recipe; the working directory is {Path.cwd()}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: the recipe cannot be read: {error}.") from error
    node = _compose(text, str(path), "")
    if node is None:
        raise ConfigError(f"{path}: the recipe is empty; it needs at least model, data and run.")
    content = _Reader(str(path), problems).written(node, f"{path}:1").mapping
    if content is None:
        raise ConfigError(f"{path}:{node.start_mark.line + 1}: a recipe is a mapping of sections (model: ...).")
    return content


def _compose(text: str, source: str, hint: str) -> Node | None:
    try:
        return yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark and not hint else ""
        raise ConfigError(f"{source}{line}: not valid YAML: {error.problem or error.context}.{hint}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {error}.{hint}") from None


class _Reader:
    """Turns YAML nodes into values; collects duplicate keys and what YAML has but recipes do not."""

    def __init__(self, source: str, problems: list[str], *, lines: bool = True) -> None:
        self.source = source
        self.problems = problems
        self.lines = lines
        self.open: set[int] = set()  # nodes being read: an alias to one of them would never end

    def where(self, node: Node) -> str:
        return f"{self.source}:{node.start_mark.line + 1}" if self.lines else self.source

    def written(self, node: Node, where: str) -> Written:
        if not isinstance(node, MappingNode):
            return Written(self.data(node), where)
        if id(node) in self.open:
            raise ConfigError(f"{where}: the value contains itself (a YAML alias to an outer anchor).")
        self.open.add(id(node))
        found: dict[str, Written] = {}
        for key_node, value_node in cast(list[tuple[Node, Node]], node.value):
            key, at = self.key(key_node), self.where(key_node)
            if key in found:
                self.problems.append(f"{at}: {key} is given twice, first at {found[key].where}; remove one.")
            found[key] = self.written(value_node, at)
        self.open.remove(id(node))
        return Written(found, where)

    def key(self, node: Node) -> str:
        if not isinstance(node, ScalarNode):
            raise ConfigError(f"{self.where(node)}: a key must be a name.")
        if node.value == "<<":
            raise ConfigError(f"{self.where(node)}: YAML merge keys (<<) are not read; use inherits.")
        return str(node.value)

    def data(self, node: Node) -> Any:
        if isinstance(node, SequenceNode):
            if id(node) in self.open:
                raise ConfigError(f"{self.where(node)}: the list contains itself (a YAML alias to an outer anchor).")
            self.open.add(id(node))
            items = [self.data(item) for item in cast(list[Node], node.value)]
            self.open.remove(id(node))
            return items
        if isinstance(node, MappingNode):
            return {self.key(key): self.data(value) for key, value in cast(list[tuple[Node, Node]], node.value)}
        return self.scalar(str(node.tag).removeprefix(_TAG), str(node.value), self.where(node))

    def scalar(self, kind: str, text: str, where: str) -> Any:
        digits = text.replace("_", "")
        if kind in ("null", "bool", "str"):
            return {"null": None, "bool": text.lower() == "true", "str": text}[kind]
        if kind not in ("int", "float"):
            raise ConfigError(f"{where}: the YAML tag {kind} is not read; write the plain value.")
        try:
            return int(digits) if kind == "int" else float(digits.replace(".inf", "inf").replace(".nan", "nan"))
        except ValueError:
            raise ConfigError(f"{where}: {text!r} is no {kind}.") from None


# ---------------------------------------------------------------------------------------------------------------- flags
def read_flags(overrides: Sequence[str], problems: list[str]) -> list[Written]:
    """Dotted flags, one nested mapping each, in order: ``--a.b c``, ``--a.b=c`` or ``--a.b`` alone.

    Raises:
        ConfigError: a word that belongs to no flag, or a value that is no YAML.
    """
    layers: list[Written] = []
    words = list(overrides)
    while words:
        flag, equals, text = words.pop(0).partition("=")
        if not flag.startswith("--"):
            raise ConfigError(f"{flag}: a word without a flag; settings are given as --section.setting value.")
        alone = not equals and not (words and not words[0].startswith("--"))
        value = Written(True, flag, alone=True) if alone else _flag_value(flag, text if equals else words.pop(0))
        if value is None:
            problems.append(f"{flag}: the value is empty (an unset shell variable?); write null to unset it.")
            continue
        for name in reversed(flag.removeprefix("--").split(".")):
            value = Written({name: value}, flag)
        layers.append(value)
    return layers


def _flag_value(flag: str, text: str) -> Written | None:
    if not text.strip():
        return None
    node = _compose(text, flag, f" The value was {text!r}; text with special characters needs quotes of its own.")
    return None if node is None else _Reader(flag, [], lines=False).written(node, flag)
