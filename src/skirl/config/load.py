"""Recipe + flags -> Config, with where each value came from. Flags win over files, over presets, over defaults.

Every problem is reported at once, with file and line or the flag, what was written, and what is right.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from pydantic import ValidationError

from skirl.config.base import Frozen
from skirl.config.describe import Setting, Spec, settings
from skirl.config.method import PRESETS
from skirl.config.resolve import Resolver
from skirl.config.schema import Config
from skirl.config.written import Written, read_files, read_flags
from skirl.errors import ConfigError

__all__ = ["Loaded", "leaves", "load"]

_ROOT = Spec("a recipe", models=(Config,))


@dataclass(frozen=True, slots=True)
class Loaded:
    """A recipe, resolved.

    Attributes:
        config: every value.
        provenance: dotted path of every leaf -> "recipes/x.yaml:12", "--flag", "preset grpo" or "default".
        recipe: the file that was asked for.
    """

    config: Config
    provenance: Mapping[str, str]
    recipe: Path


def load(recipe: Path, overrides: Sequence[str] = ()) -> Loaded:
    """Reads a recipe with all that it inherits, and the flags over it.

    Mappings are merged key by key, but a choice of another ``kind`` replaces the whole choice. An entry of named things
    (a data source, a reward term) is taken out by setting it to null.

    Args:
        recipe: YAML file; the JSON of a saved ``config.json`` is one too.
        overrides: the words of the flags: ``["--trainer.optim.lr", "1e-6", "--run.resume"]``.

    Raises:
        ConfigError: one message with every problem found.
    """
    problems: list[str] = []
    written = Written({}, str(recipe))
    for layer in [*read_files(recipe, problems), *read_flags(overrides, problems)]:
        written = _merge(written, _expand(layer, _ROOT), _ROOT)
    written = _over_preset(written)

    resolver = Resolver(str(recipe), written, problems)
    data = resolver.section("", written.mapping or {}, Config)
    try:
        config = Config.model_validate(data)
    except ValidationError as error:
        resolver.explain(error.errors())
        raise _failure(recipe, problems) from None
    if problems:
        raise _failure(recipe, problems)
    origins = {path: _origin(path, written) for path, _ in leaves(config)}
    return Loaded(config, MappingProxyType(origins), recipe)


def leaves(config: Frozen) -> list[tuple[str, Any]]:
    """(dotted path, value) of every setting, in the order of the schema; an empty mapping is a leaf."""
    return _leaves("", dict(config))


def _leaves(prefix: str, values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    result: list[tuple[str, Any]] = []
    for name, value in values.items():
        path = prefix + name
        inside: Mapping[str, Any] = {}
        if isinstance(value, Frozen):
            inside = dict(value)
        elif isinstance(value, Mapping):
            inside = cast(Mapping[str, Any], value)
        result += _leaves(path + ".", inside) if inside else [(path, value)]
    return result


def _failure(recipe: Path, problems: list[str]) -> ConfigError:
    if len(problems) == 1:
        return ConfigError(problems[0])
    return ConfigError(f"{recipe} has {len(problems)} problems:\n" + "\n".join(f"  {problem}" for problem in problems))


def _expand(written: Written, spec: Spec | None) -> Written:
    """Bare names of a kind become mappings, so that merging sees one form only."""
    if spec is None:
        return written
    if written.mapping is None:
        if spec.variants and isinstance(written.value, str):
            return Written({"kind": written}, written.where)
        return written
    kind = _kind(written)
    return Written(
        {key: _expand(value, spec.child(key, kind)) for key, value in written.mapping.items()}, written.where
    )


def _merge(below: Written, over: Written, spec: Spec | None) -> Written:
    low, high = below.mapping, over.mapping
    if low is None or high is None:
        return over
    kind = _kind(over) or _kind(below)
    if spec is not None and _is_other_variant(spec, _kind(below), _kind(over)):
        return over
    result = dict(low)
    for key, value in high.items():
        if key not in low:
            result[key] = value
        elif spec is not None and spec.named and value.value is None:
            del result[key]
        else:
            result[key] = _merge(low[key], value, spec.child(key, kind) if spec else None)
    return Written(result, over.where)


def _is_other_variant(spec: Spec, low: str | None, high: str | None) -> bool:
    known = spec.variants
    if low is None or high is None or not known:
        return False
    return low != high if low not in known or high not in known else known[low] is not known[high]


def _kind(written: Written) -> str | None:
    kind = (written.mapping or {}).get("kind")
    return kind.value if kind is not None and isinstance(kind.value, str) else None


def _over_preset(written: Written) -> Written:
    """The method's preset below everything that was written."""
    method = (written.mapping or {}).get("method", Written({}, ""))
    if method.mapping is None:
        return written
    default: Setting = settings(settings(Config)["method"].spec.models[0])["preset"]
    chosen = method.mapping.get("preset")
    name = str(chosen.value if chosen else default.default)
    if name not in PRESETS:
        return written
    base = Written({"method": _plain_to_written(PRESETS[name], f"preset {name}")}, written.where)
    return _merge(base, written, _ROOT)


def _plain_to_written(value: Any, where: str) -> Written:
    if isinstance(value, Mapping):
        items = cast(Mapping[str, Any], value).items()
        return Written({key: _plain_to_written(item, where) for key, item in items}, where)
    return Written(value, where)


def _origin(path: str, written: Written) -> str:
    for name in path.split("."):
        if written.mapping is None:
            return written.where
        if name not in written.mapping:
            return "default"
        written = written.mapping[name]
    return written.where
