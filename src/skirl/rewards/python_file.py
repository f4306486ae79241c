"""Rewards from a user's Python file: loading it, telling its form, calling it, checking what it returns.

Three forms are told apart by the first parameter: its annotation if there is one, else its name. Each may be async.

    def reward(sample: RewardSample) -> float | dict: ...            one sample a call (any other name counts as this)
    def reward(samples: list[RewardSample]) -> list[...]: ...        a whole group a call ("samples" or "group")
    def reward(batch: list[RewardSample]) -> list[...]: ...          several whole groups a call ("batch")

A result is a number, or named parts: a mapping of names to numbers, where None is a part that does not apply. The part
"turns" is a list with one number a turn of the response.
"""

import asyncio
import contextlib
import hashlib
import importlib.util
import inspect
import linecache
import math
import numbers
import sys
import traceback
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from skirl.errors import ConfigError
from skirl.records import RewardSample, ScoreFailure
from skirl.rewards.combine import Parts

__all__ = ["TURNS", "Form", "RewardFunction", "call_fenced", "load", "load_source", "read"]

Form = Literal["sample", "group", "batch"]
"""What a function takes: one sample, all samples of a group, all samples of several groups."""

TURNS = "turns"
"""Name of the part that holds a number for each turn."""
MAX_DETAIL = 4000  # characters of a traceback that are kept
SEVERAL: Mapping[str, Form] = {"samples": "group", "group": "group", "batch": "batch"}
FOREIGN_NAMES = frozenset(
    {"completion", "completion_ids", "completions", "data_source", "ground_truth", "ground_truths", "labels"}
    | {"output", "outputs", "prompt", "prompts", "queries", "query", "response", "responses", "solution_str"}
)
FORMS = (
    "    def reward(sample):        one skirl.records.RewardSample; returns a number or a dict of named numbers\n"
    "    def reward(samples):       all samples of a group; returns a list of these, one for each sample\n"
    "    def reward(batch):         all samples of several groups; returns a list of these, one for each sample\n"
    "Each may be async. A sample holds: text (raw response), transcript, language, reference, reference_language, "
    "seconds, finish_reason, response_ids, messages, num_turns, scores (of services and reward models), and row "
    "(every column of the data row)."
)
MOVING = (
    "Moving a function over from another framework: completions, responses, queries or solution_str become "
    "[s.text for s in samples]; labels or ground_truth become s.reference; any other column becomes s.row['column']."
)


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A user's function and how to call it.

    Attributes:
        path: its file, for messages.
        name: its name; also the name of the part when it returns a bare number.
        call: the function itself.
        form: what it takes.
        is_async: it is awaited.
    """

    path: str
    name: str
    call: Callable[[Any], Any]
    form: Form
    is_async: bool

    def score(self, samples: Sequence[RewardSample]) -> list[Parts | ScoreFailure]:
        """One call: a whole group, several, or a single sample. Never raises for what the user's code does.

        Returns:
            Parts or a failure for each sample, in order. If a call fails, so does each of its samples.
        """
        if self.is_async:
            return asyncio.run(self.score_async(samples))
        results = call_fenced(lambda: self._check_all(self.call(self._argument(samples)), samples), self.path)
        return [results] * len(samples) if isinstance(results, ScoreFailure) else results

    async def score_async(self, samples: Sequence[RewardSample]) -> list[Parts | ScoreFailure]:
        """As ``score``, in the event loop that runs."""
        try:
            return self._check_all(await self.call(self._argument(samples)), samples)
        except (Exception, SystemExit) as error:  # fence: as in call_fenced
            return [_failure(error, self.path)] * len(samples)

    def _argument(self, samples: Sequence[RewardSample]) -> RewardSample | list[RewardSample]:
        if self.form != "sample":
            return list(samples)
        if len(samples) != 1:
            raise ValueError(f"a sample-wise function scores one sample a call, got {len(samples)}")
        return samples[0]

    def _check_all(self, value: Any, samples: Sequence[RewardSample]) -> list[Parts | ScoreFailure]:
        if self.form == "sample":
            return [self._check(value, samples[0])]
        values = _as_list(value)
        if values is None or len(values) != len(samples):
            got = _describe(value) if values is None else f"{len(values)} scores"
            message = (
                f"{self._who} returned {got} for a {self.form} of {len(samples)}; return a list with one score a sample"
            )
            return [ScoreFailure("bad_type", message)] * len(samples)
        return [self._check(item, sample) for item, sample in zip(values, samples, strict=True)]

    @property
    def _who(self) -> str:
        return f"{self.name} ({Path(self.path).name})"

    def _check(self, value: Any, sample: RewardSample) -> Parts | ScoreFailure:
        if not isinstance(value, Mapping):
            number = self._check_number(value, "")
            return number if isinstance(number, ScoreFailure) else {self.name: number}
        if not value:
            return ScoreFailure("bad_type", f"{self._who} returned an empty mapping; return at least one named part")
        parts: Parts = {}
        for name, item in value.items():
            if not isinstance(name, str):
                message = f"{self._who} returned a part named {name!r}, a {type(name).__name__}; names must be str"
                return ScoreFailure("bad_type", message)
            part = None if item is None else self._check_part(name, item, sample)
            if isinstance(part, ScoreFailure):
                return part
            parts[str(name)] = part
        return parts

    def _check_part(self, name: str, item: Any, sample: RewardSample) -> float | tuple[float, ...] | ScoreFailure:
        if name != TURNS:
            return self._check_number(item, f" for part {name!r}")
        values = _as_list(item)
        if values is None or len(values) != sample.num_turns:
            got = _describe(item) if values is None else f"{len(values)} numbers"
            wanted = f"a list with one number a turn (this response has {sample.num_turns})"
            return ScoreFailure("bad_type", f"{self._who} returned {got} for part {name!r}; return {wanted}")
        turns: list[float] = []
        for turn in values:
            number = self._check_number(turn, f" in part {name!r}")
            if isinstance(number, ScoreFailure):
                return number
            turns.append(number)
        return tuple(turns)

    def _check_number(self, value: Any, where: str) -> float | ScoreFailure:
        number = _as_number(value)
        if number is None:
            wanted = "a number" if where else "a number or a mapping of part names to numbers"
            hint = " (is a return missing?)" if value is None else ""
            message = f"{self._who} returned {_describe(value)}{where}{hint}; return {wanted}"
            return ScoreFailure("bad_type", message)
        if not math.isfinite(number):
            message = f"{self._who} returned {number}{where}; a score must be a finite number"
            return ScoreFailure("not_finite", message)
        return number


def read(path: Path) -> str:
    """The text of a reward file.

    Raises:
        ConfigError: there is no such file, or it is not text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"reward.python: cannot read {str(path)!r} ({problem}); the full path is {path.absolute()}. "
            "Give the path of a Python file with a function `def reward(sample)`."
        ) from error


def load(path: Path, function: str = "reward") -> RewardFunction:
    """Loads a function from a file, under a module name of its own; ``sys.path`` stays as it is.

    Args:
        path: the Python file.
        function: name of the function in it.

    Raises:
        ConfigError: the file is missing, does not compile, fails while it is run, lacks the function, or the function
            has another signature. The message holds the user's own lines of the traceback.
    """
    return load_source(read(path), str(path), function)


def load_source(source: str, path: str, function: str = "reward") -> RewardFunction:
    """As ``load``, for text already read: a process started later runs the same code, even if the file changed."""
    try:
        code = compile(source, path, "exec")
    except SyntaxError as error:
        line = (error.text or "").strip()
        raise ConfigError(f"reward.python: {path} line {error.lineno}: {error.msg}: `{line}`") from error
    except ValueError as error:  # null bytes
        raise ConfigError(f"reward.python: {path} is not Python source: {error}") from error
    name = f"skirl_reward_{hashlib.sha256(path.encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_loader(name, loader=None, origin=path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = path
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    sys.modules[name] = module  # dataclasses and pickle look their module up
    failure = call_fenced(lambda: exec(code, module.__dict__), path)
    if isinstance(failure, ScoreFailure):
        del sys.modules[name]
        raise ConfigError(
            f"reward.python: {path} failed while it was loaded: {failure.message}\n{failure.detail}".rstrip()
            + _hint_of_sibling(failure.message, path)
        )
    call = _find(module, path, function)
    return RewardFunction(path, function, call, _form(call, path, function), _is_async(call))


def call_fenced(call: Callable[[], Any], path: str) -> Any:
    """Runs foreign code; what it raises comes back as a failure that shows the lines of ``path``."""
    try:
        return call()
    except (Exception, SystemExit) as error:  # fence: a user's code may raise anything; counted, bounded
        return _failure(error, path)


def _failure(error: BaseException, path: str) -> ScoreFailure:
    """The error in one line, and its traceback from the user's first line on."""
    trace = error.__traceback__
    own = trace
    while own is not None and own.tb_frame.f_code.co_filename != path:
        own = own.tb_next
    trace = own or trace
    where = ""
    for frame in traceback.extract_tb(trace):
        if frame.filename == path:
            where = f" ({Path(path).name} line {frame.lineno}, in {frame.name})"
    lines = str(error).strip().splitlines()
    said = f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
    detail = "".join(traceback.format_exception(type(error), error, trace, limit=-20)).strip()
    return ScoreFailure("raised", said + where, detail[-MAX_DETAIL:])


def _hint_of_sibling(message: str, path: str) -> str:
    """A module that stands beside the reward file is not importable; say so where that was the problem."""
    if not message.startswith("ModuleNotFoundError: No module named "):
        return ""
    name = message.split("'")[1].split(".")[0]
    folder = Path(path).absolute().parent
    if not (folder / f"{name}.py").exists() and not (folder / name).is_dir():
        return ""
    return (
        f"\n{name} stands beside the reward file, but that directory is not on Python's path: "
        f"run with PYTHONPATH={folder}, or install it as a package."
    )


def _find(module: types.ModuleType, path: str, function: str) -> Callable[[Any], Any]:
    found = vars(module).get(function)
    if found is None:
        own = [
            name
            for name, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
        ]
        has = f"it has: {', '.join(own)}; set reward.function to one of these" if own else "it has no public function"
        raise ConfigError(f"reward.function: {path} has no function {function!r} ({has}).\n{FORMS}")
    if not callable(found):
        raise ConfigError(f"reward.function: {function!r} in {path} is a {type(found).__name__}, not a function.")
    if inspect.isasyncgenfunction(found):
        raise ConfigError(f"reward.function: {function!r} in {path} yields; an async function must return its result.")
    return found


def _is_async(call: Callable[[Any], Any]) -> bool:
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(type(call).__call__)


def _form(call: Callable[[Any], Any], path: str, function: str) -> Form:
    """What a function takes; ConfigError if it takes anything else than samples."""
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):  # builtins and extension modules may have none
        return "sample"
    parameters = list(signature.parameters.values())
    first = parameters[0] if parameters else None
    required = [
        parameter
        for parameter in parameters[1:]
        if parameter.default is parameter.empty
        and parameter.kind not in {parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL}
    ]
    positional = first is not None and first.kind in {first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD}
    form = None
    if first is not None and positional and not required:
        several = _read_annotation(call, first)
        if several is None and first.name not in FOREIGN_NAMES and first.annotation in {first.empty, Any, "Any"}:
            several = first.name in SEVERAL
        if several is not None:
            form = SEVERAL.get(first.name, "group") if several else "sample"
    if form is None:
        foreign = any(parameter.name in FOREIGN_NAMES for parameter in parameters)
        raise ConfigError(
            f"reward.function: `def {function}{signature}` in {path} does not have the form of a reward function. "
            f"Write one of\n{FORMS}" + (f"\n{MOVING}" if foreign else "")
        )
    return form


def _read_annotation(call: Callable[[Any], Any], parameter: inspect.Parameter) -> bool | None:
    """True for a sequence of samples, False for one sample, None if the annotation says neither."""
    annotation = parameter.annotation
    with contextlib.suppress(NameError, TypeError, AttributeError):  # names for type checkers only: read it as text
        annotation = typing.get_type_hints(call).get(parameter.name, annotation)
    if annotation is RewardSample:
        return False
    origin = typing.get_origin(annotation) or annotation
    if isinstance(origin, type) and issubclass(origin, Sequence) and not issubclass(origin, str):
        nested = any(typing.get_origin(inner) is not None for inner in typing.get_args(annotation))
        return None if nested else True  # a list of lists: no form passes one
    text = annotation.replace(" ", "").strip("'\"") if isinstance(annotation, str) else ""
    if text.rsplit(".", 1)[-1] == "RewardSample":
        return False
    if text.count("[") > 1:
        return None
    return True if text.split("[")[0].rsplit(".", 1)[-1] in {"list", "List", "Sequence", "tuple", "Tuple"} else None


def _as_number(value: Any) -> float | None:
    """A Python or numpy number, or a tensor without dimensions, as float; bool counts as 0 or 1; None for the rest."""
    plain = isinstance(value, numbers.Real)
    if not plain and not (hasattr(value, "shape") and tuple(value.shape) == ()):
        return None
    try:
        return float(value)
    except OverflowError:  # an int beyond the range of float
        return math.inf
    except (TypeError, ValueError):
        return None


def _as_list(value: Any) -> list[Any] | None:
    """A list, tuple, or one-dimensional array or tensor as a list; None for the rest."""
    if isinstance(value, list | tuple):
        return list(value)
    if hasattr(value, "shape") and len(tuple(value.shape)) == 1:
        return list(value)
    return None


def _describe(value: Any) -> str:
    if value is None:
        return "None"
    text = repr(value)
    return f"a {type(value).__name__} {text[:80]}{'...' if len(text) > 80 else ''}"
