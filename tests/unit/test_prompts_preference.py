"""Rows of the offline commands: pairs, labelled responses, steps, conversations; each mistake with its place."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from skirl.config.schema import DataConfig, SourceConfig
from skirl.errors import DataError
from skirl.prompts.conversation import conversation
from skirl.prompts.manifests.columns import Source
from skirl.prompts.preference import labelled, pair
from skirl.prompts.steps import steps
from skirl.prompts.validate import TooManyTokens, load_examples

SOURCE = Source("mine", SourceConfig(path=Path("rows.jsonl")))
USER, YES, NO = ({"role": r, "content": c} for r, c in (("user", "2+2"), ("assistant", "4"), ("assistant", "5")))
MORE = {"role": "user", "content": "sure?"}


def parse(function: Any, **record: Any) -> Any:
    return function(SOURCE, record, "rows.jsonl:3")


# ---------------------------------------------------------------------------------------------------------------- pairs
@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "2+2", "chosen": "4", "rejected": "5"},
        {"prompt": [USER], "chosen": [YES], "rejected": [NO]},
        {"messages": [USER], "chosen": [USER, YES], "rejected": "5"},
        {"chosen": [USER, YES], "rejected": [USER, NO]},
        {
            "conversations": [{"from": "human", "value": "2+2"}],
            "chosen": {"from": "gpt", "value": "4"},
            "rejected": "5",
        },
    ],
)
def test_pairs_are_read_in_every_form(record):
    found = parse(pair, **record, id="7", level=3)
    assert (found.row.messages, found.chosen, found.rejected) == ((USER,), (YES,), (NO,))
    assert (found.row.id, found.row.source, found.row.where, found.margin) == ("7", "mine", "rows.jsonl:3", 0.0)
    assert found.row.extra == {"level": 3}


def test_what_both_begin_with_is_the_prompt():
    found = parse(pair, chosen=[USER, YES, MORE, YES], rejected=[USER, YES, MORE, NO], margin=2)
    assert (found.row.messages, found.chosen, found.rejected, found.margin) == ((USER, YES, MORE), (YES,), (NO,), 2.0)
    several = parse(pair, prompt="2+2", chosen=[NO, MORE, YES], rejected="")
    assert several.chosen == (NO, MORE, YES)
    assert several.rejected == ({"role": "assistant", "content": ""},)  # saying nothing can be the worse response


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a", "chosen": "4"}, "column 'rejected' is missing; expected a text, or turns"),
        ({"prompt": "a", "chosen": 4, "rejected": "5"}, "column 'chosen' holds 4; expected a text, or a list of turns"),
        ({"prompt": "a", "chosen": " ", "rejected": "5"}, "column 'chosen', turn 0: the assistant's turn is empty"),
        ({"prompt": "a", "chosen": "4", "rejected": "4"}, "columns 'chosen' and 'rejected' are equal"),
        ({"prompt": "", "chosen": "4", "rejected": "5"}, "column 'prompt' is empty"),
        ({"prompt": 7, "chosen": "4", "rejected": "5"}, "column 'prompt' holds 7"),
        ({"chosen": "4", "rejected": "5"}, "the row has no prompt: expected a column prompt or messages"),
        ({"prompt": [USER, YES], "chosen": "4", "rejected": "5"}, "column 'prompt' ends with a turn of the assistant"),
        ({"prompt": "a", "chosen": [MORE], "rejected": "5"}, "column 'chosen' continues the prompt with user"),
        ({"chosen": [USER, YES], "rejected": [USER, YES, MORE, NO]}, "'chosen' continues the prompt with nothing"),
        ({"prompt": "a", "chosen": [{"role": "bot", "content": "x"}], "rejected": "5"}, "role 'bot' is none of"),
        ({"prompt": "a", "chosen": [{"text": "x"}], "rejected": "5"}, "column 'chosen': a turn is"),
        (
            {"prompt": "a", "chosen": "4", "rejected": "5", "margin": "big"},
            "column 'margin' holds 'big'; expected a",
        ),
        ({"prompt": "a", "chosen": "4", "rejected": "5", "margin": float("nan")}, "column 'margin' holds nan"),
    ],
)
def test_pairs_that_are_none(record, message):
    with pytest.raises(DataError, match=rf"^rows\.jsonl:3: .*{message}"):
        parse(pair, **record)


def test_a_margin_can_be_demanded():
    with pytest.raises(DataError, match="column 'margin' is missing; expected a number"):
        parse(partial(pair, needs_margin=True), prompt="a", chosen="4", rejected="5")


# ------------------------------------------------------------------------------------------------- labelled, steps, sft
@pytest.mark.parametrize("label", [True, False, 1, 0])
def test_labelled_responses(label):
    found = parse(labelled, prompt="2+2", completion="4", label=label)
    assert (found.row.messages, found.response, found.label) == ((USER,), (YES,), bool(label))


def test_steps_and_their_labels():
    found = parse(steps, prompt="2+2", steps=["2+2", "= 4"], labels=[True, 0.25])
    assert (found.row.messages, found.steps, found.labels) == ((USER,), ("2+2", "= 4"), (1.0, 0.25))


@pytest.mark.parametrize(
    ("function", "record", "message"),
    [
        (labelled, {"prompt": "a", "response": "b"}, "column 'label' is missing; expected true"),
        (labelled, {"prompt": "a", "response": "b", "label": "yes"}, "column 'label' holds 'yes'; expected true"),
        (labelled, {"prompt": "a", "label": True}, "column 'response' is missing"),
        (labelled, {"response": "b", "label": True}, "column 'prompt' is missing"),
        (
            labelled,
            {"prompt": "a", "response": "", "label": True},
            "the assistant's turn is empty",
        ),
        (steps, {"prompt": "a", "labels": [True]}, "column 'steps' is missing; expected a list of texts"),
        (steps, {"prompt": "a", "steps": "one", "labels": [True]}, "column 'steps' holds 'one'"),
        (steps, {"prompt": "a", "steps": ["b", " "], "labels": [1, 0]}, "column 'steps', step 1 holds ' '"),
        (steps, {"prompt": "a", "steps": ["b"], "labels": [2]}, "column 'labels', step 0 holds 2; expected true"),
        (steps, {"prompt": "a", "steps": ["b", "c"], "labels": [1]}, "'steps' has 2 entries and column 'labels' 1"),
        (steps, {"steps": ["b"], "labels": [1]}, "column 'prompt' is missing"),
        (conversation, {"messages": [USER]}, "nothing to learn from: column 'messages' holds no turn of the assistant"),
        (conversation, {"messages": [USER, {"role": "assistant", "content": ""}]}, "the assistant's turn is empty"),
        (conversation, {"text": "b"}, "the row has no prompt"),
    ],
)
def test_rows_that_do_not_fit(function, record, message):
    with pytest.raises(DataError, match=rf"rows\.jsonl:3: .*({message})"):
        parse(function, **record)


def test_conversations():
    found = parse(conversation, messages=[USER, YES, MORE, NO])
    assert (found.turns, found.row.messages, found.row.text) == ((USER, YES, MORE, NO), (USER, YES, MORE), "5")
    for answer in ("answer", "response", "completion"):
        assert parse(conversation, prompt="2+2", **{answer: "4"}).turns == (USER, YES)
    asked = parse(conversation, messages=[USER, YES, MORE])
    assert (asked.turns, asked.row.text) == ((USER, YES, MORE), None)
    assert parse(partial(conversation, needs_answer=False), prompt="2+2").turns == (USER,)


# -------------------------------------------------------------------------------------------------------------- sources
GOOD = {"prompt": "2+2", "chosen": "4", "rejected": "5"}


def write(path: Path, rows: list[Mapping[str, Any]]) -> SourceConfig:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return SourceConfig(path=path)


def build(found: Any) -> str:
    if "long" in found.row.messages[0]["content"]:
        raise TooManyTokens("it has 99 tokens")
    return found.row.id


def test_every_wrong_row_is_in_the_report(tmp_path):
    rows = [
        GOOD,
        {**GOOD, "id": "x", "chosen": 3},
        {**GOOD, "id": "y"},
        {**GOOD, "id": "y"},
        {**GOOD, "prompt": "long"},
    ]
    sources = {"a": write(tmp_path / "a.jsonl", rows)}
    with pytest.raises(DataError) as caught:
        load_examples(sources, DataConfig(), pair, build)
    said = str(caught.value)
    for part in (
        "5 rows (a 5), 3 invalid",
        "INVALID  row does not fit the command: 1 row",
        f"{tmp_path}/a.jsonl:2  id 'x'",
        "column 'chosen' holds 3; expected a text",
        "INVALID  row has more tokens than a micro-batch: 1 row",
        f"{tmp_path}/a.jsonl:5  id 'a:5'",
        "it has 99 tokens",
        "nothing is cut off",
        f"first in {tmp_path}/a.jsonl:3",
        "data.on_invalid: drop",
    ):
        assert part in said, said
    found, report = load_examples(sources, DataConfig(on_invalid="drop"), pair, build)
    assert (found, report.num_dropped) == (["a:1", "y"], 3)
    with pytest.raises(DataError, match="No row is left"):
        load_examples({"a": write(tmp_path / "a.jsonl", rows[1:2])}, DataConfig(on_invalid="drop"), pair, build)


def test_forms_of_files(tmp_path):
    array = tmp_path / "rows.json"
    array.write_text(json.dumps([GOOD, GOOD]), encoding="utf-8")
    pq.write_table(pa.Table.from_pylist([{**GOOD, "id": "p"}]), tmp_path / "rows.parquet")
    sources = {"j": SourceConfig(path=array, limit=1), "p": SourceConfig(path=tmp_path / "rows.parquet")}
    assert load_examples(sources, DataConfig(), pair, build)[0] == ["rows:1", "p"]


@pytest.mark.parametrize(
    ("name", "format", "message"),
    [
        ("none.jsonl", "auto", r"none\.jsonl: there is no such manifest\. Correct data\.<train\|eval>\.a\.path"),
        ("rows.jsonl", "kaldi", r"format is kaldi, but this command reads text: JSON lines or Parquet"),
        ("empty.jsonl", "auto", r"empty\.jsonl: holds no rows\. Correct data\.<train\|eval>\.a\.path, or fill"),
        ("rows.csv", "auto", r"rows\.csv: is a CSV file, but this command reads JSON lines or Parquet\. Convert it"),
        ("rows.parquet", "auto", r"rows\.parquet: cannot be read as Parquet .*\. Write or copy it again"),
    ],
)
def test_sources_that_cannot_be_read(tmp_path, name, format, message):
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "rows.csv").write_text("prompt,chosen,rejected\n")
    (tmp_path / "rows.parquet").write_text("no parquet")
    write(tmp_path / "rows.jsonl", [GOOD])
    with pytest.raises(DataError, match=message):
        load_examples({"a": SourceConfig(path=tmp_path / name, format=format)}, DataConfig(), pair, build)
