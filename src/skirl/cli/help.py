"""Help texts and docs/config.md, made from the schema."""

import textwrap
from collections.abc import Iterator

from skirl.config.describe import Entry, entries

__all__ = ["settings_help", "settings_markdown"]

_WIDTH = 100


def settings_help() -> str:
    """Every setting with its type, default and meaning, in sections, at most 100 columns wide."""
    return "\n".join(line for entry in entries() for line in _lines(entry))


def _lines(entry: Entry) -> Iterator[str]:
    if entry.section:
        state = f"  ({entry.words})" if "null" in entry.words else ""
        yield ""
        yield from _wrap(f"{entry.path}{state}: {entry.doc}", "", "    ")
        return
    if entry.kind is not None:
        yield from _wrap(f"with {entry.path} = {entry.kind}: {entry.doc}", "  ", "      ")
        return
    if "." not in entry.path:
        yield ""
    default = "(required)" if entry.default == "required" else f"[{entry.default}]"
    yield from _wrap(f"--{entry.path}  {entry.words.removeprefix('a ')}  {default}", "  ", "      ")
    yield from _wrap(entry.doc, "      ", "      ")


def _wrap(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(
        text.replace("``", "`"),
        _WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def settings_markdown() -> str:
    """docs/config.md: the same as tables, one a section."""
    lines = [
        "# Settings",
        "",
        "Made from `src/skirl/config` by `make docs`; change the docstrings there. A setting is written in a recipe as",
        "nested YAML, or as a flag: `--trainer.optim.lr 1e-6`. Flags win over the recipe, the recipe over what it",
        "`inherits`, that over the method's preset, the preset over the defaults below.",
        "`<name>` is a free name; an inherited entry is taken out by setting it to `null`.",
    ]
    section = ""
    for entry in entries():
        top = entry.path.split(".")[0]
        if top != section:
            section = top
            doc = entry.doc if entry.path == top else ""
            lines += [
                "",
                f"## {top}",
                "",
                *([doc, ""] if doc else []),
                "| setting | value | default | meaning |",
                "|---|---|---|---|",
            ]
            if entry.path == top and entry.section:
                continue
        lines.append(_row(entry))
    return "\n".join(lines) + "\n"


def _row(entry: Entry) -> str:
    doc = entry.doc.replace("|", "\\|").replace("``", "`").replace("\n", " ")
    if entry.kind is not None:
        return f"| `{entry.path}.kind: {entry.kind}` | | | *{doc}* |"
    if entry.section:
        return f"| **`{entry.path}`** | {entry.words} | {entry.default} | {doc} |"
    return f"| `{entry.path}` | {entry.words.removeprefix('a ')} | {entry.default.replace('|', '')} | {doc} |"
