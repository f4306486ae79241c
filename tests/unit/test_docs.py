"""What the documents say can be done: recipes load, commands parse, links lead somewhere."""

import re
import shlex
from pathlib import Path

import pytest

from skirl.config.check import check
from skirl.config.describe import valid_paths
from skirl.config.load import load

ROOT = Path(__file__).parents[2]
RECIPES = sorted(p for p in (ROOT / "recipes").glob("*.yaml") if p.stem != "demo-base")
OFFLINE = ("sft", "rm", "prm", "dpo", "kd", "sample")
COMMAND = re.compile(rf"^[ #$]*(skirl (?:{'|'.join(OFFLINE)}|train|eval|show) .*?)(?: +#.*)?$", re.MULTILINE)


def commands(path: Path) -> list[str]:
    return COMMAND.findall(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe_is_right_for_its_command(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    loaded = load(recipe)
    sections = dict(loaded.config)
    command = next((name for name in OFFLINE if sections[name] is not None), "train")
    assert check(loaded.config, command, loaded.provenance) == []


@pytest.mark.parametrize(
    "document", [ROOT / "README.md", ROOT / "docs" / "offline.md", *RECIPES], ids=lambda path: path.name
)
def test_commands_parse(document: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    found = commands(document)
    assert found
    for command in found:
        _, name, recipe, *flags = shlex.split(command)
        loaded = load(Path(recipe), flags)
        if name != "show":
            check(loaded.config, name, loaded.provenance)


def test_links_lead_somewhere() -> None:
    for document in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", document.read_text(encoding="utf-8")):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_settings_named_for_movers_exist() -> None:
    known = set(valid_paths())
    table = (ROOT / "docs" / "names.md").read_text(encoding="utf-8").splitlines()[6:]
    named = [name for line in table for name in re.findall(r"`([^`]+)`", line.split("|")[3])]
    assert len(named) > 20
    sections = {path.rsplit(".", n)[0] for path in known for n in range(1, 4)}
    assert [name for name in named if name not in known | sections] == []


def test_make_targets_named_in_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for line in re.findall(r"^    make ([a-z -]+?)(?: *#.*)?$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M):
        for target in line.split():
            assert re.search(rf"^{target}:", makefile, re.M), target
