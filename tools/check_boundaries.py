"""Check the rules of the house style that need a syntax tree: what may be used where, sizes, fences.

Run as ``python tools/check_boundaries.py src/skirl``. Each finding is one line, ``path:line: rule: what to do``; the
exit code is 1 when there is any, 2 when there is nothing to check. import-linter checks which part of skirl may import
which other part; this file checks what only a call, a literal or a comment shows.

Where a rule allows it, a comment with the reason excuses a line: ``# size: ...`` on a function's ``def``,
``# fence: ...`` on an ``except``, ``# getattr: ...`` on a call. Reasons are read in review.
"""

import argparse
import ast
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

MAX_FUNCTION_LINES = 60
MAX_EXCUSED_FUNCTION_LINES = 100
MAX_FILE_LINES = 500
PATCHES = "runtime/patches.py"
"""Where other libraries are patched: the one file that may touch their private parts and be outside their homes."""


@dataclass(frozen=True)
class Fence:
    """Modules that may be used only in some places; paths are relative to the package, a directory ends in "/"."""

    modules: tuple[str, ...]
    homes: tuple[str, ...]


@dataclass(frozen=True)
class Bar:
    """A module that must not be used in some places."""

    module: str
    places: tuple[str, ...]


FENCES = (
    Fence(("ray",), ("runtime/ray/", PATCHES)),
    Fence(("deepspeed",), ("training/backends/deepspeed.py", PATCHES)),
    Fence(
        ("vllm",),
        (
            "rollouts/engines/vllm.py",
            "rollouts/engines/vllm_records.py",
            "rollouts/engines/vllm_scheduler.py",
            "weights/vllm_worker.py",
            PATCHES,
        ),
    ),
    Fence(("torch.cuda",), ("runtime/device.py", "weights/transports/")),
    Fence(("torch.distributed",), ("runtime/process_groups.py", "training/backends/", "weights/")),
    Fence(("os.environ", "os.environb", "os.getenv", "os.putenv", "os.unsetenv"), ("runtime/env.py",)),
    Fence(("wandb", "tensorboard", "torch.utils.tensorboard"), ("tracking/sinks/",)),
    Fence(
        ("transformers", "datasets"),
        (
            "models/",
            "prompts/",
            "rollouts/render.py",
            "rollouts/engines/policy.py",
            "training/attention.py",
            "testing/",
            PATCHES,
        ),
    ),
)
BARS = (
    Bar("torch", ("config/", "cli/", "errors.py")),
    Bar("skirl.config", ("algorithms/", "records.py", "protocols.py")),
)
CUDA_HOMES = ("runtime/device.py", "weights/transports/")


@dataclass(frozen=True, order=True)
class Finding:
    """One broken rule."""

    path: Path
    line: int
    rule: str
    advice: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.advice}"


@dataclass(frozen=True)
class Use:
    """A dotted name of an imported module, as resolved at one line."""

    line: int
    name: str

    def is_of(self, module: str) -> bool:
        """Whether the name is the module or something in it."""
        return self.name == module or self.name.startswith(module + ".")


class Source:
    """One parsed file of the package."""

    def __init__(self, path: Path, root: Path) -> None:
        self.path = path
        self.place = path.relative_to(root).as_posix()
        self.package = ".".join((root.name, *path.relative_to(root).parent.parts))
        text = path.read_text(encoding="utf-8")
        self.lines = text.splitlines()
        self.tree = ast.parse(text, filename=str(path))
        self.nodes = list(ast.walk(self.tree))

    def lies_in(self, places: tuple[str, ...]) -> bool:
        """Whether this file is one of the places, or below one that ends in "/"."""
        return any(self.place.startswith(p) if p.endswith("/") else self.place == p for p in places)

    def find(self, line: int, rule: str, advice: str) -> Finding:
        """A finding in this file."""
        return Finding(self.path, line, rule, advice)

    def has_reason(self, mark: str, first: int, last: int) -> bool:
        """Whether one of the lines carries the comment ``# mark: reason``."""
        pattern = re.compile(rf"#\s*{mark}:\s*\S")
        return any(pattern.search(line) for line in self.lines[first - 1 : last])

    @cached_property
    def uses(self) -> tuple[Use, ...]:
        """Every imported module, and every dotted name that starts at one."""
        imported: list[Use] = []
        names: dict[str, str] = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    imported.append(Use(node.lineno, alias.name))
                    names[alias.asname or alias.name.split(".")[0]] = (
                        alias.name if alias.asname else alias.name.split(".")[0]
                    )
            elif isinstance(node, ast.ImportFrom):
                module = self._absolute(node)
                for alias in node.names:
                    imported.append(Use(node.lineno, f"{module}.{alias.name}"))
                    names[alias.asname or alias.name] = f"{module}.{alias.name}"
            elif isinstance(node, ast.Call) and (loaded := _dynamic_import(node)):
                imported.append(Use(node.lineno, loaded))
        return tuple(imported + self._attributes(names))

    def _absolute(self, node: ast.ImportFrom) -> str:
        if node.level == 0:
            return node.module or ""
        parts = self.package.split(".")
        base = parts[: len(parts) - node.level + 1]
        return ".".join([*base, *([node.module] if node.module else [])])

    def _attributes(self, names: dict[str, str]) -> list[Use]:
        inner = {id(node.value) for node in self.nodes if isinstance(node, ast.Attribute)}
        outermost = [node for node in self.nodes if isinstance(node, ast.Attribute) and id(node) not in inner]
        chains = [(node.lineno, _chain(node)) for node in outermost]
        return [Use(line, ".".join((names[c[0]], *c[1:]))) for line, c in chains if c and c[0] in names]


def _chain(node: ast.expr) -> tuple[str, ...]:
    """("a", "b", "c") of the expression a.b.c; empty for any other expression."""
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute) and (head := _chain(node.value)):
        return (*head, node.attr)
    return ()


def _dynamic_import(call: ast.Call) -> str | None:
    chain = _chain(call.func)
    if chain and chain[-1] in {"import_module", "__import__"} and call.args and isinstance(call.args[0], ast.Constant):
        return str(call.args[0].value)
    return None


def check_fences(source: Source) -> Iterator[Finding]:
    """Modules stay in their homes."""
    for use in source.uses:
        for fence in FENCES:
            for module in fence.modules:
                if use.is_of(module) and not source.lies_in(fence.homes):
                    homes = ", ".join(home for home in fence.homes if home != PATCHES)
                    yield source.find(use.line, f"{module} only at its home", f"move this use to {homes}")
        for bar in BARS:
            if use.is_of(bar.module) and source.lies_in(bar.places):
                yield source.find(use.line, f"no {bar.module} here", f"{', '.join(bar.places)} must not need it")


def check_cuda(source: Source) -> Iterator[Finding]:
    """The device is chosen in one place: nobody else names CUDA."""
    if source.lies_in(CUDA_HOMES):
        return
    advice = "take the device from runtime/device.py, or as an argument"
    for node in source.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value == "cuda" or node.value.startswith("cuda:"):
                yield source.find(node.lineno, '"cuda" only at its home', advice)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
            yield source.find(node.lineno, ".cuda() only at its home", advice)


def check_private(source: Source) -> Iterator[Finding]:
    """A dependency's private names can vanish in any release."""
    if source.place == PATCHES:
        return
    for use in source.uses:
        parts = use.name.split(".")
        if parts[0] in sys.stdlib_module_names or parts[0] == source.package.split(".")[0]:
            continue
        if any(part.startswith("_") and not part.endswith("__") for part in parts):
            advice = f"use a public name, or patch in {PATCHES} with link, version bound and removal condition"
            yield source.find(use.line, f"private API {use.name}", advice)


def check_sizes(source: Source) -> Iterator[Finding]:
    """Functions and files that fit in a reader's head."""
    if len(source.lines) > MAX_FILE_LINES:
        yield source.find(1, "file size", f"{len(source.lines)} lines, at most {MAX_FILE_LINES}: split by purpose")
    for node in source.nodes:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        excused = source.has_reason("size", node.lineno, max(node.lineno, node.body[0].lineno - 1))
        limit = MAX_EXCUSED_FUNCTION_LINES if excused else MAX_FUNCTION_LINES
        if length > limit:
            excuse = "" if excused else f" ('# size: reason' on the def line allows {MAX_EXCUSED_FUNCTION_LINES})"
            advice = f"{node.name} has {length} lines, at most {limit}: split it{excuse}"
            yield source.find(node.lineno, "function size", advice)


def check_calls(source: Source) -> Iterator[Finding]:
    """No output past the logger; no defaults beside the one in the schema."""
    for node in source.nodes:
        if not isinstance(node, ast.Call):
            continue
        chain = _chain(node.func)
        if chain == ("print",):
            yield source.find(node.lineno, "print", "use logging, or the console sink")
        elif chain == ("getattr",) and len(node.args) == 3:
            if not source.has_reason("getattr", node.lineno, node.end_lineno or node.lineno):
                advice = "read the attribute itself; for an object of another library say '# getattr: reason'"
                yield source.find(node.lineno, "getattr with a default", advice)
        elif len(chain) > 1 and chain[-1] == "get" and chain[-2] in {"config", "cfg"}:
            advice = "settings are typed: read the field; give a plain mapping another name (raw)"
            yield source.find(node.lineno, "config.get", advice)


def check_excepts(source: Source) -> Iterator[Finding]:
    """Errors are caught by type; the few fences say why they are there."""
    for node in source.nodes:
        if isinstance(node, ast.ExceptHandler):
            broad = (node.type is None or _is_broad(node.type)) and not _goes_on(node.body[-1])
        elif isinstance(node, ast.Call) and _chain(node.func)[-1:] == ("suppress",):
            broad = any(_is_broad(arg) for arg in node.args)
        else:
            continue
        if broad and not source.has_reason("fence", node.lineno, node.lineno):
            advice = "catch the types that you can handle, or end with raise; at a fence say '# fence: reason' here"
            yield source.find(node.lineno, "broad except", advice)


def _goes_on(last: ast.stmt) -> bool:
    """Whether a handler ends with a plain ``raise``: it only tidies up, and hides nothing."""
    return isinstance(last, ast.Raise) and last.exc is None


def _is_broad(node: ast.expr) -> bool:
    if isinstance(node, ast.Tuple):
        return any(_is_broad(item) for item in node.elts)
    return _chain(node)[-1:] in {("Exception",), ("BaseException",)}


def check_names(source: Source) -> Iterator[Finding]:
    """A name says what is inside."""
    if any(part in {"utils", "util"} for part in Path(source.place).with_suffix("").parts):
        yield source.find(1, "file name", "name it after the thing it holds, not utils")


def check_field_docs(source: Source) -> Iterator[Finding]:
    """Every setting is explained where it is defined: help texts and docs come from there."""
    if not source.lies_in(("config/",)):
        return
    for node in source.nodes:
        if isinstance(node, ast.ClassDef) and _is_settings(node):
            for field, after in zip(node.body, [*node.body[1:], None], strict=True):
                if isinstance(field, ast.AnnAssign) and _is_field(field) and not _is_text(after):
                    name = f"{node.name}.{ast.unparse(field.target)}"
                    yield source.find(field.lineno, "undocumented setting", f"write a docstring below {name}")


def _is_settings(node: ast.ClassDef) -> bool:
    bases = {_chain(base)[-1:] for base in node.bases}
    others = {("Protocol",), ("Enum",), ("StrEnum",), ("IntEnum",), ("TypedDict",), ("NamedTuple",)}
    return bool(bases) and not bases & others and not node.decorator_list


def _is_field(node: ast.AnnAssign) -> bool:
    hidden = ast.unparse(node.target).startswith("_")
    return not hidden and not ast.unparse(node.annotation).startswith(("ClassVar", "typing.ClassVar"))


def _is_text(node: ast.stmt | None) -> bool:
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
        return False
    return isinstance(node.value.value, str) and bool(node.value.value.strip())


CHECKS: tuple[Callable[[Source], Iterator[Finding]], ...] = (
    check_fences,
    check_cuda,
    check_private,
    check_sizes,
    check_calls,
    check_excepts,
    check_names,
    check_field_docs,
)


def check_file(path: Path, root: Path) -> set[Finding]:
    """Every finding in one file; a rule counts once a line."""
    try:
        source = Source(path, root)
    except SyntaxError as error:
        return {Finding(path, error.lineno or 1, "syntax", str(error.msg))}
    return {finding for check in CHECKS for finding in check(source)}


def check_package(root: Path) -> list[Finding]:
    """Every finding below the package's directory, in order of place."""
    return sorted(finding for path in root.rglob("*.py") for finding in check_file(path, root))


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0 clean, 1 findings, 2 nothing to check."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("package", type=Path, help="directory of the package, such as src/skirl")
    root: Path = parser.parse_args(arguments).package.resolve()
    if not any(root.rglob("*.py")):
        print(f"{root}: no Python file here", file=sys.stderr)
        return 2
    findings = check_package(root)
    here = Path.cwd()
    for finding in findings:
        path = finding.path.relative_to(here) if finding.path.is_relative_to(here) else finding.path
        print(Finding(path, finding.line, finding.rule, finding.advice))
    if findings:
        print(f"{len(findings)} broken rule(s)", file=sys.stderr)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
