"""Reports of an evaluation: a summary table, and every utterance, worst first, with its alignment.

``write_evaluation`` makes four files:
- ``utterances.tsv``: one line an utterance with counts and texts, for spreadsheets and scripts;
- ``alignments.txt``: the same utterances for reading, reference above transcript;
- ``utterances.jsonl``: the same with the edits of every sample, for ``read_evaluation``;
- ``summary.json``: the rates, with normaliser version and bootstrap settings.
"""

import json
import math
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from skirl.evaluation.error_rates import Difference, ErrorRate, Evaluation, Interval, Utterance, evaluate
from skirl.speech.edits import Edits, align, units
from skirl.speech.normalize import NORMALIZER_VERSION

__all__ = [
    "alignment_lines",
    "alignments_text",
    "comparison_table",
    "read_evaluation",
    "summary",
    "summary_table",
    "utterances_tsv",
    "worst_first",
    "write_evaluation",
]

_COLUMNS = (
    "source",
    "id",
    "language",
    "unit",
    "edits",
    "insertions",
    "deletions",
    "substitutions",
    "num_reference",
    "rate",
    "expected_rate",
    "truncated",
    "reference",
    "hypothesis",
)
_ESCAPES = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"})
_MARKS = {"equal": "", "substitute": "S", "delete": "D", "insert": "I"}
_GAP_OF_WORD = 3
_DOTTED_CIRCLE = "\u25cc"


def worst_first(utterances: Iterable[Utterance]) -> list[Utterance]:
    """Most edits first, as they cost the corpus rate most; then the shorter reference, then source and id."""
    return sorted(utterances, key=lambda u: (-u.edits.total, u.edits.num_reference, u.key))


def alignment_lines(utterance: Utterance) -> tuple[str, str, str]:
    """Reference, transcript and marks, with each unit above its counterpart.

    Units are the normalised ones that edits are counted on. A side without a unit shows stars; the marks are S, D, I.
    Columns fit terminals: wide characters take two cells, combining marks none (a mark alone is shown on a dotted
    circle).

    Returns:
        Three lines of equal width but for trailing spaces, which are cut.
    """
    smallest_gap = 1 if utterance.unit == "char" else _GAP_OF_WORD
    rows: tuple[list[str], list[str], list[str]] = ([], [], [])
    columns = align(
        units(utterance.reference, utterance.unit, utterance.language),
        units(utterance.hypothesis, utterance.unit, utterance.language),
    )
    for operation, reference, hypothesis in columns:
        shown = [_visible(unit) for unit in (reference or "", hypothesis or "")]
        width = max(map(_width, shown))
        if operation in ("insert", "delete"):
            width = max(width, smallest_gap)
            shown[operation == "delete"] = "*" * width
        for row, text in zip(rows, (*shown, _MARKS[operation]), strict=True):
            row.append(text + " " * (width - _width(text)))
    reference_line, hypothesis_line, marks = (" ".join(row).rstrip() for row in rows)
    return reference_line, hypothesis_line, marks


def alignments_text(utterances: Iterable[Utterance]) -> str:
    """Every utterance, worst first, with its alignment, for reading."""
    return "\n".join(line for utterance in worst_first(utterances) for line in _block(utterance))


def utterances_tsv(utterances: Iterable[Utterance]) -> str:
    """One line an utterance, worst first, under a header.

    Texts are as they were, with backslash, tab and line ends written as backslash escapes; there is no quoting. A rate
    without reference units or samples is an empty field.
    """
    lines = ["\t".join(_COLUMNS)]
    for utterance in worst_first(utterances):
        edits = utterance.edits
        values = (
            utterance.source,
            utterance.id,
            utterance.language or "",
            utterance.unit,
            str(edits.total),
            str(edits.insertions),
            str(edits.deletions),
            str(edits.substitutions),
            str(edits.num_reference),
            _decimal(edits.rate),
            _decimal(utterance.expected_edits / edits.num_reference if edits.num_reference else float("nan")),
            "1" if utterance.truncated else "0",
            utterance.reference,
            utterance.hypothesis,
        )
        lines.append("\t".join(value.translate(_ESCAPES) for value in values))
    return "\n".join(lines) + "\n"


def summary(evaluation: Evaluation) -> dict[str, Any]:
    """All rates as JSON values; a rate without reference units is null."""
    return {
        "normalizer_version": evaluation.normalizer_version,
        "bootstrap": evaluation.bootstrap,
        "seed": evaluation.seed,
        "overall": _finite(asdict(evaluation.overall)),
        "sources": [_finite(asdict(rate)) for rate in evaluation.sources],
        "languages": [_finite(asdict(rate)) for rate in evaluation.languages],
    }


def summary_table(evaluation: Evaluation, title: str | None = None) -> Table:
    """Rates by source, by language below a source that has several, and of all if there are several sources."""
    table = _table(title, "source", "rate", ("greedy", "95 %", "ins", "del", "sub", "expect", "95 %", "cut", "clips"))
    for source in evaluation.sources:
        table.add_row(*_cells(source, source.source or ""))
        languages = [rate for rate in evaluation.languages if rate.source == source.source]
        if len(languages) > 1:
            for rate in languages:
                table.add_row(*_cells(rate, f"  {rate.language or 'language not known'}"), style="dim")
    if len(evaluation.sources) > 1:
        table.add_section()
        table.add_row(*_cells(evaluation.overall, "all"))
    legend = "all in % but clips; expect: mean over sampled transcripts; cut: ended by the budget"
    table.caption = "\n".join([legend, *_notes(evaluation.overall)])
    return table


def comparison_table(differences: Iterable[tuple[str, Difference]], title: str | None = None) -> Table:
    """Before, after and their difference with its paired interval, a row for each (label, difference).

    A star marks a difference whose interval leaves out 0.
    """
    table = _table(title, "", "rate", ("before", "after", "difference", "95 %", ""))
    table.caption = "rates in %; * the interval leaves out 0"
    for label, difference in differences:
        table.add_row(
            Text(label),
            f"{difference.quantity} {difference.name}",
            _percent(difference.before),
            _percent(difference.after),
            _percent(difference.value, sign=True),
            _span(Interval(difference.value, difference.low, difference.high), sign=True),
            "*" if difference.is_significant else "",
        )
    return table


def write_evaluation(directory: Path, evaluation: Evaluation) -> None:
    """Writes the utterances and, last, summary.json; each file is whole or absent.

    Args:
        directory: made if missing; files of an earlier evaluation in it are replaced.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "summary.json").unlink(missing_ok=True)
    files = {
        "utterances.tsv": utterances_tsv(evaluation.utterances),
        "alignments.txt": alignments_text(evaluation.utterances),
        "utterances.jsonl": "".join(json.dumps(asdict(u)) + "\n" for u in evaluation.utterances),
        "summary.json": json.dumps(summary(evaluation), indent=2, ensure_ascii=False, allow_nan=False) + "\n",
    }
    for name, text in files.items():
        partial = directory / f"{name}.partial"
        # A lone surrogate in a transcript is no UTF-8; it is written as an escape.
        partial.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")
        partial.replace(directory / name)


def read_evaluation(directory: Path) -> Evaluation | None:
    """What ``write_evaluation`` wrote; None where it did not end, was another version's, or counted on texts normalised
    in another way than now.
    """
    try:
        told = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
        lines = (directory / "utterances.jsonl").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return None
    if told["normalizer_version"] != NORMALIZER_VERSION:
        return None
    found: list[Utterance] = []
    for line in lines:
        row = json.loads(line)
        counted = {"edits": Edits(**row["edits"]), "samples": tuple(Edits(**sample) for sample in row["samples"])}
        found.append(Utterance(**{**row, **counted}))
    return evaluate(found, bootstrap=told["bootstrap"], seed=told["seed"])


def _table(title: str | None, label: str, rate: str, figures: Iterable[str]) -> Table:
    """Fits 80 columns; where it does not, the label is wrapped and never a figure."""
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, padding=0)
    table.title_justify = table.caption_justify = "left"
    table.add_column(label, overflow="fold")
    table.add_column(rate, no_wrap=True)
    for heading in figures:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _block(utterance: Utterance) -> Iterator[str]:
    edits = utterance.edits
    rate = "no reference units" if edits.num_reference == 0 else f"{100 * edits.rate:.1f} %"
    expected = ""
    if utterance.samples:
        expected = f"  sampled {utterance.expected_edits:.2f}"
    cut = "  CUT OFF" if utterance.truncated else ""
    yield (
        f"{utterance.source}/{utterance.id}  {utterance.language or 'language not known'}  {utterance.unit}  "
        f"{edits.total}/{edits.num_reference} = {rate}  "
        f"ins {edits.insertions} del {edits.deletions} sub {edits.substitutions}{expected}{cut}"
    )
    for label, line in zip(("REF", "HYP", "   "), alignment_lines(utterance), strict=True):
        yield f"  {label} {line}".rstrip()
    yield ""


def _width(text: str) -> int:
    """Terminal cells."""
    return sum(
        0 if unicodedata.category(char) in {"Mn", "Me"} else 2 if unicodedata.east_asian_width(char) in "WF" else 1
        for char in text
    )


def _visible(unit: str) -> str:
    return _DOTTED_CIRCLE + unit if unit and _width(unit) == 0 else unit


def _cells(rate: ErrorRate, label: str) -> list[str | Text]:
    expected = rate.expected
    parts = [_percent(part) for part in (rate.insertions, rate.deletions, rate.substitutions)]
    return [
        Text(label),
        rate.name,
        _percent(rate.greedy.value),
        _span(rate.greedy),
        *parts,
        "" if expected is None else _percent(expected.value),
        "" if expected is None else _span(expected),
        _percent(rate.truncated),
        str(rate.num_utterances),
    ]


def _notes(rate: ErrorRate) -> Iterator[str]:
    if rate.expected is not None and rate.num_sampled < rate.num_utterances:
        yield f"expected: over the {rate.num_sampled} of {rate.num_utterances} clips that have samples"
    if rate.num_no_reference > rate.num_vanished:
        yield f"empty references: {rate.num_no_reference - rate.num_vanished} (all their edits are insertions)"
    if rate.num_vanished:
        yield f"references of nothing but punctuation or symbols: {rate.num_vanished} (check the data)"


def _percent(value: float, *, sign: bool = False) -> str:
    if math.isnan(value):
        return "n/a"
    return f"{100 * value:+.2f}" if sign else f"{100 * value:.2f}"


def _span(interval: Interval, *, sign: bool = False) -> str:
    if math.isnan(interval.low):
        return ""
    dash = " .. " if sign else "-"
    return f"{_percent(interval.low, sign=sign)}{dash}{_percent(interval.high, sign=sign)}"


def _decimal(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.6f}"


def _finite(value: Any) -> Any:
    """NaN to None, at any depth: JSON has no NaN."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
