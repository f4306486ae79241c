"""CHANGELOG.md keeps its form, and its newest entry is the version in pyproject.toml."""

import datetime
import re
import tomllib
from pathlib import Path

import skirl

ROOT = Path(__file__).parents[2]
ENTRY = re.compile(r"^## \[(?P<version>\d+\.\d+\.\d+)\] - (?P<date>Unreleased|\d{4}-\d{2}-\d{2})$")
SECTIONS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def entries() -> list[tuple[str, str]]:
    """(version, date) of each entry, as written; a malformed heading fails here."""
    lines = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    headings = [line for line in lines if line.startswith("## ")]
    matches = [ENTRY.match(heading) for heading in headings]
    assert None not in matches, f"write '## [1.2.3] - YYYY-MM-DD' or '- Unreleased': {headings}"
    return [(match["version"], match["date"]) for match in matches if match]


def test_newest_entry_is_the_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert entries()[0][0] == project["version"] == skirl.__version__


def test_entries_descend_and_only_the_newest_is_unreleased() -> None:
    versions = [tuple(map(int, version.split("."))) for version, _ in entries()]
    assert versions == sorted(set(versions), reverse=True)
    dates = [datetime.date.fromisoformat(date) for _, date in entries()[1:]]
    assert dates == sorted(dates, reverse=True)


def test_sections_are_those_of_keep_a_changelog() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    assert {line[4:] for line in lines if line.startswith("### ")} <= SECTIONS
