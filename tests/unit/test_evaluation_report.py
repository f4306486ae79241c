"""Reports: aligned lines, the per-utterance table, the summary, and what is written."""

import csv
import dataclasses
import io
import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table

from skirl.evaluation.error_rates import Utterance, compare, evaluate, score_utterance
from skirl.evaluation.report import (
    alignment_lines,
    alignments_text,
    comparison_table,
    read_evaluation,
    summary,
    summary_table,
    utterances_tsv,
    worst_first,
    write_evaluation,
)
from skirl.speech.edits import Unit


def scored(reference: str, hypothesis: str, **changes) -> Utterance:
    fields: dict[str, Any] = {"id": "1", "source": "hard", "language": "English", "unit": "auto"} | changes
    return score_utterance(reference=reference, hypothesis=hypothesis, **fields)


def shown(table: Table, width: int = 200) -> str:
    file = io.StringIO()
    console = Console(file=file, width=width, color_system=None)
    console.print(table)
    return file.getvalue()


def cells(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)


def test_words_stand_above_their_counterparts() -> None:
    assert alignment_lines(scored("One two three four, five six seven", "one three four five a six eight")) == (
        "one two three four five *** six seven",
        "one *** three four five a   six eight",
        "    D                   I       S",
    )


def test_wide_characters_take_two_cells() -> None:
    assert alignment_lines(scored("我用code写", "我在coat写好", language="Chinese")) == (
        "我 用 code 写 ***",
        "我 在 coat 写 好",
        "   S  S       I",
    )


def test_characters_have_narrow_gaps_and_lone_marks_a_circle() -> None:
    assert alignment_lines(scored("six", "sixt", unit="char")) == ("s i x *", "s i x t", "      I")
    assert alignment_lines(scored("九二", "九", unit="char", language="Chinese")) == ("九 二", "九 **", "   D")
    reference, hypothesis, _ = alignment_lines(scored("कु", "क", unit="char", language="Hindi"))
    assert (reference, hypothesis) == ("क \u25ccु", "क *")


def test_an_empty_side_is_all_stars() -> None:
    assert alignment_lines(scored("", "hello a")) == ("***** ***", "hello a", "I     I")
    assert alignment_lines(scored("", "")) == ("", "", "")


@given(
    st.text("ab 你好吗 x", max_size=15), st.text("ab 你好吗 x", max_size=15), st.sampled_from(["char", "word", "mixed"])
)
@settings(max_examples=200)
def test_columns_line_up_in_terminal_cells(reference: str, hypothesis: str, unit: Unit) -> None:
    """Cutting both lines at the spaces they share in the same cells gives back both texts and the edits."""
    utterance = scored(reference, hypothesis, unit=unit)
    lines = alignment_lines(utterance)
    width = max(map(cells, lines))
    grids = []
    for line in lines:
        grid = []
        for char in line:
            grid += [char] + [""] * (cells(char) - 1)
        grids.append(grid + [" "] * (width - len(grid)))
    columns, start = [], 0
    for cell in range(width + 1):
        if cell == width or all(grid[cell] == " " for grid in grids):
            texts = tuple("".join(grid[start:cell]).strip() for grid in grids)
            if any(texts):
                columns.append(texts)
            start = cell + 1
    differing = sum(ref != hyp for ref, hyp, _ in columns)
    assert differing == utterance.edits.total
    assert sum(mark != "" for _, _, mark in columns) == utterance.edits.total
    joined = "".join(ref for ref, _, _ in columns if "*" not in ref)
    assert joined == "".join(reference.split())


def test_worst_is_most_edits_then_shorter_reference() -> None:
    rows = [
        scored("a b c", "a b c", id="right"),
        scored("a b c d", "a b c x", id="long"),
        scored("a", "x", id="short"),
        scored("a b c", "", id="worst"),
    ]
    assert [row.id for row in worst_first(rows)] == ["worst", "short", "long", "right"]


def test_the_table_of_utterances_survives_tabs_and_line_ends() -> None:
    rows = [
        scored("five\tsix", 'a "b\n\\', id="1", samples=["five six", "five"], truncated=True),
        scored("...", "", id="2", language=None),
    ]
    text = utterances_tsv(rows)
    assert text.endswith("\n")
    first, second = csv.DictReader(io.StringIO(text), delimiter="\t", quoting=csv.QUOTE_NONE)
    assert first == {
        "source": "hard",
        "id": "1",
        "language": "English",
        "unit": "word",
        "edits": "2",
        "insertions": "0",
        "deletions": "0",
        "substitutions": "2",
        "num_reference": "2",
        "rate": "1.000000",
        "expected_rate": "0.250000",
        "truncated": "1",
        "reference": "five\\tsix",
        "hypothesis": 'a "b\\n\\\\',
    }
    assert (second["language"], second["rate"], second["expected_rate"], second["truncated"]) == ("", "", "", "0")


def test_the_text_of_alignments() -> None:
    assert alignments_text([scored("five six", "five", id="a", samples=["five"], truncated=True)]) == (
        "hard/a  English  word  1/2 = 50.0 %  ins 0 del 1 sub 0  sampled 1.00  CUT OFF\n"
        "  REF five six\n"
        "  HYP five ***\n"
        "           D\n"
    )


@pytest.fixture
def rows() -> list[Utterance]:
    return [
        scored("five six", "five sex", id="en", unit="char", samples=["five six", "five"]),
        scored("九二", "九", id="zh", unit="char", language="Chinese", samples=["九二", "九二"]),
        scored("one", "one", id="en", unit="char", source="clean", samples=["one", "on"]),
    ]


def test_the_summary_table_has_sources_languages_and_all(rows: list[Utterance]) -> None:
    text = shown(summary_table(evaluate(rows), "held out"))
    by_label = {line.split()[0]: line.split()[1:] for line in text.splitlines() if " CER " in line}
    assert list(by_label) == ["clean", "hard", "Chinese", "English", "all"]
    name, greedy, _, *parts, expected, _, cut, clips = by_label["hard"]
    assert (name, greedy, parts, expected, cut, clips) == (
        "CER",
        "22.22",
        ["0.00", "11.11", "11.11"],
        "16.67",
        "0.00",
        "2",
    )
    assert by_label["Chinese"][1] == "50.00"
    assert by_label["all"][1] == "16.67"


def test_a_narrow_terminal_cuts_no_figure(rows: list[Utterance]) -> None:
    table = summary_table(evaluate([dataclasses.replace(row, source=f"a long name of a {row.source}") for row in rows]))
    wide, narrow = (shown(table, width) for width in (200, 80))
    figures = [word for word in wide.split() if word[0].isdigit()]
    assert [word for word in narrow.split() if word[0].isdigit()] == figures
    assert max(map(cells, narrow.splitlines())) <= 80


def test_the_summary_table_says_what_is_odd() -> None:
    odd = [scored("...", "a", id="1"), scored("", "a", id="2"), scored("a", "a", id="3", samples=["a"])]
    text = shown(summary_table(evaluate(odd)))
    assert "references of nothing but punctuation or symbols: 1 " in text
    assert "empty references: 1 " in text
    assert "over the 1 of 3 clips that have samples" in text
    assert "references" not in shown(summary_table(evaluate(odd[2:])))


def test_names_with_brackets_are_text_and_not_markup() -> None:
    table = summary_table(evaluate([scored("a", "a", source="[bold]x[/]")]))
    assert "[bold]x[/]" in shown(table)


def test_the_comparison_table(rows: list[Utterance]) -> None:
    better = [
        scored(row.reference, row.reference, id=row.id, unit="char", source=row.source, language=row.language)
        for row in rows
    ]
    text = shown(comparison_table([("hard, harder", compare(rows, better))]))
    assert "greedy CER" in text
    assert "-16.67" in text


def test_the_summary_is_json_with_null_for_no_rate() -> None:
    result = summary(evaluate([scored("", "a", language=None)], bootstrap=150, seed=3))
    again = json.loads(json.dumps(result, allow_nan=False))
    assert again["overall"]["greedy"] == {"value": None, "low": None, "high": None}
    assert again["overall"]["expected"] is None
    assert (again["bootstrap"], again["seed"], again["normalizer_version"]) == (150, 3, "1")
    assert len(again["sources"]) == len(again["languages"]) == 1


def test_an_evaluation_is_written_whole(tmp_path: Path, rows: list[Utterance]) -> None:
    directory = tmp_path / "evaluation" / "step-1"
    odd = scored("five", "\ud800 six\n", id="broken")
    write_evaluation(directory, evaluate([*rows, odd]))
    names = ["alignments.txt", "summary.json", "utterances.jsonl", "utterances.tsv"]
    assert sorted(path.name for path in directory.iterdir()) == names
    table = (directory / "utterances.tsv").read_text("utf-8").splitlines()
    assert len(table) == 5
    assert "\\ud800 six\\n" in table[-1] + table[1] + table[2]
    assert "HYP 九 **" in (directory / "alignments.txt").read_text("utf-8")
    assert json.loads((directory / "summary.json").read_text("utf-8"))["overall"]["num_utterances"] == 4
    write_evaluation(directory, evaluate(rows))  # replaces
    assert json.loads((directory / "summary.json").read_text("utf-8"))["overall"]["num_utterances"] == 3


def test_what_was_written_is_read_again(tmp_path: Path, rows: list[Utterance]) -> None:
    odd = scored("five", "\ud800 six\n", id="broken", samples=["five", "for"])
    evaluation = evaluate([*rows, odd], bootstrap=50, seed=7)
    write_evaluation(tmp_path, evaluation)
    assert read_evaluation(tmp_path) == evaluation
    told = tmp_path / "summary.json"
    told.write_text(told.read_text("utf-8").replace('"normalizer_version": "', '"normalizer_version": "not '), "utf-8")
    assert read_evaluation(tmp_path) is None
    (tmp_path / "utterances.jsonl").unlink()
    assert read_evaluation(tmp_path) is None
    assert read_evaluation(tmp_path / "nowhere") is None
