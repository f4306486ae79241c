"""The host side of the offline commands: examples, KTO's baseline, plans, held-out losses; rows that sample writes."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from skirl.assemble import make_setup
from skirl.assemble_offline import _learn_speech, _store_scores
from skirl.config.offline import SampleConfig
from skirl.config.schema import Config, SourceConfig
from skirl.errors import ConfigError, DataError
from skirl.evaluation.losses import loss_table
from skirl.lessons import Example, ExampleMaker, Form, Lesson, check_mismatched, score_statistics
from skirl.models.families import TEXT
from skirl.prompts.conversation import conversation
from skirl.prompts.manifests.columns import Source, audio_row
from skirl.prompts.preference import labelled, pair
from skirl.prompts.steps import steps
from skirl.prompts.validate import TooManyTokens
from skirl.records import Group, Media, Prompt, Rollout, Sampling, Score, ScoredGroup, ScoreFailure
from skirl.rollouts.render import Renderer
from skirl.samples import SampleFile, measure_samples, select_rows
from skirl.testing.fake_trainer import FakeTrainer
from skirl.testing.tiny_task import tiny_tokenizer
from tests import tiny

TOKENIZER = tiny_tokenizer()
SOURCE = Source("s", SourceConfig(path=Path("rows.jsonl")))
END = TOKENIZER.eos_token_id


def ids(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def maker(max_tokens: int = 1000) -> ExampleMaker:
    renderer = Renderer(TEXT, TOKENIZER, SimpleNamespace(), forced=False, num_samples=lambda media, least: 0)
    return ExampleMaker(renderer, end_ids=(END,), max_tokens=max_tokens)


def read(function: Any, **record: Any) -> Any:
    found = function(SOURCE, record, "rows.jsonl:1")
    return replace(found, row=replace(found.row, id=record.get("id", "1")))


PROMPT = [*ids("say 0"), END, *ids("<|im_start|>")]
PAIR = {"prompt": "say 0", "chosen": "00", "rejected": "123", "margin": 2.0}


def test_speech_that_is_longer_than_a_micro_batch_is_told_of_before_anything_starts(checkpoints, tmp_path):
    """Not at whatever step the row comes up."""
    clips = {"short": tiny.clip(0, 1.0), "long": tiny.clip(1, 3.0)}
    rows = [
        {"id": name, "audio": clip.path, "start": clip.start_s, "duration": clip.duration_s, "text": "a", "lang": "en"}
        for name, clip in clips.items()
    ]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    setup = make_setup(
        Config.model_validate(
            {
                "model": {"path": checkpoints["native"]},
                "data": {"train": {"s": {"path": tmp_path / "m.jsonl"}}},
                "run": {"dir": tmp_path / "run"},
                "sft": {"steps": 1, "batch_size": 1},
                "trainer": {"max_tokens_per_micro_batch": 80},
            }
        )
    )
    with pytest.raises(DataError, match=r"(?s)more tokens than a micro-batch: 1 row\n.*id 'long'\n +it has 89 tokens"):
        _learn_speech(setup)
    assert not (tmp_path / "run").exists()


# ------------------------------------------------------------------------------------------------------------- examples
def test_a_pair_is_two_sequences_chosen_first():
    made = maker().pair(read(pair, **PAIR), at="all")
    chosen, rejected = made.sequences
    assert (chosen.id, rejected.id) == ("s/1#chosen", "s/1#rejected")
    assert chosen.input_ids.tolist() == [*PROMPT, *ids("00"), END]
    assert rejected.input_ids.tolist() == [*PROMPT, *ids("123"), END]
    assert chosen.action_positions.tolist() == [7, 8, 9]
    assert rejected.action_positions.tolist() == [7, 8, 9, 10]
    assert [s.preference.chosen for s in made.sequences] == [True, False]
    assert [s.preference.margin for s in made.sequences] == [2.0, 2.0]
    assert made.prompt.input_ids == tuple(PROMPT)
    ends = maker().pair(read(pair, **PAIR), at="last").sequences
    assert [s.action_positions.tolist() for s in ends] == [[9], [10]]


def test_a_pair_whose_responses_go_on_for_several_turns():
    turns = [{"role": r, "content": c} for r, c in (("assistant", "1"), ("user", "no"), ("assistant", "0"))]
    chosen = maker().pair(read(pair, prompt="say 0", chosen=turns, rejected="1"), at="all").sequences[0]
    text = [*PROMPT, *ids("1"), END, *ids("no"), END, *ids("<|im_start|>0"), END]
    assert chosen.input_ids.tolist() == text
    assert chosen.action_positions.tolist() == [7, 8, 13, 14]


def test_steps_carry_a_label_at_their_last_token():
    row = read(steps, prompt="say 0", steps=["00", "1"], labels=[True, 0.25])
    (made,) = maker().steps(row, "\n").sequences
    assert made.input_ids.tolist() == [*PROMPT, *ids("00\n1\n")]
    assert made.action_positions.tolist() == [9, 11]
    assert made.labels is not None
    assert made.labels.dtype == np.float32
    assert made.labels.tolist() == [1.0, 0.25]


def test_all_answers_or_the_last():
    turns = [
        {"role": r, "content": c}
        for r, c in (("user", "a"), ("assistant", "0"), ("user", "b"), ("assistant", "1"), ("user", "c"))
    ]
    row = read(conversation, messages=turns)
    (whole,) = maker().conversation(row, "all").sequences
    (last,) = maker().conversation(row, "last").sequences
    assert whole.input_ids.tolist() == last.input_ids.tolist()  # nothing after the last answer
    assert whole.action_positions.tolist() == [3, 4, 8, 9]
    assert last.action_positions.tolist() == [8, 9]


def test_nothing_is_cut_off():
    size = 2 * len(PROMPT) + 3 + 4
    assert maker(size).pair(read(pair, **PAIR), at="all")
    with pytest.raises(TooManyTokens, match=rf"chosen and rejected together have {size} tokens, and .* is {size - 1}"):
        maker(size - 1).pair(read(pair, **PAIR), at="all")
    with pytest.raises(TooManyTokens, match="it has 10 tokens"):
        maker(9).conversation(read(conversation, prompt="say 0", answer="00"), "all")
    row = read(conversation, prompt="say 0", answer="00")
    assert maker(len(PROMPT) + 3).prompt(row, 3).sequences == ()
    with pytest.raises(TooManyTokens, match=rf"max_new_tokens for its answer it has {len(PROMPT) + 4} tokens"):
        maker(len(PROMPT) + 3).prompt(row, 4)


# -------------------------------------------------------------------------------------------------------------- lessons
def lesson_of(examples: list[Example], form: Form) -> Lesson:
    by_id = {example.prompt.id: example.sequences for example in examples}
    return Lesson(lambda key, prompts: [s for p in prompts for s in by_id[p.id]], form, max_scoring_tokens=500)


def kto_examples() -> list[Example]:
    rows = [("say 0", "00", True), ("use 1", "1", False), ("do 2", "2222", True)]
    return [
        maker().labelled(read(labelled, id=str(n), prompt=p, response=r, label=ok)) for n, (p, r, ok) in enumerate(rows)
    ]


def test_pairs_stay_together_and_weigh_as_sequences():
    examples = [maker().pair(read(pair, **PAIR, id=str(n)), at="all") for n in range(5)]
    lesson = lesson_of(examples, Form("sequence", paired=True))
    sequences = lesson.prepare("k", [e.prompt for e in examples], FakeTrainer()).sequences
    plan = lesson.plan(sequences, num_ranks=2, max_tokens=45)
    for micro_batch in (m for rank in plan.steps[0].ranks for m in rank):
        names = [sequences[i].id for i in micro_batch.sequences]
        assert names[0::2] == [name.replace("rejected", "chosen") for name in names[1::2]]
    assert sum(float(w.sum()) for w in plan.weights) == pytest.approx(1.0)
    assert [float(w.sum()) for w in plan.weights] == pytest.approx([0.1] * 10)


def trained(examples: list[Example], steps: int = 3) -> FakeTrainer:
    """Prefers the tokens of all responses to the (uniform) reference."""
    trainer = FakeTrainer(vocabulary=64)
    lesson = lesson_of(examples, Form())
    sequences = lesson.prepare("k", [e.prompt for e in examples], trainer).sequences
    for _ in range(steps):
        trainer.update(lesson.plan(sequences, num_ranks=1, max_tokens=500), 1)
    return trainer


def test_the_baseline_of_kto_is_the_mean_over_mismatched_pairs():
    """arXiv:2402.01306: response i + 1 after prompt i. FakeTrainer ignores its context, so responses alone count."""
    examples = kto_examples()
    trainer = trained(examples)
    form = Form("sequence", with_reference=True, with_baseline=True)
    learned = lesson_of(examples, form).prepare("k", [e.prompt for e in examples], trainer)
    table = trainer._logits - np.log(np.exp(trainer._logits).sum())
    sums = [sum(table[t] + np.log(64) for t in [*ids(text), END]) for text in ("1", "2222", "00")]
    expected = np.mean(sums)
    assert expected > 0.1
    assert [s.preference.baseline for s in learned.sequences] == pytest.approx([expected] * 3, rel=1e-6)
    assert learned.metrics["dpo/kl_baseline"].value == pytest.approx(expected, rel=1e-6)
    assert [s.preference.chosen for s in learned.sequences] == [True, False, True]
    assert all(np.allclose(s.reference_logprobs, -np.log(64)) for s in learned.sequences)


def test_each_prompt_meets_the_next_response():
    examples = kto_examples()
    asked: list[tuple[str, list[int], list[int]]] = []

    class Asked(FakeTrainer):
        def logprobs(self, plan, role, sampling=None):
            asked.extend((role, s.input_ids.tolist(), s.action_positions.tolist()) for s in plan.sequences)
            return super().logprobs(plan, role, sampling)

    form = Form("sequence", with_reference=True, with_baseline=True)
    lesson_of(examples, form).prepare("k", [e.prompt for e in examples], Asked(vocabulary=64))
    pairs = [("say 0", "1"), ("use 1", "2222"), ("do 2", "00")]
    texts = [([*ids(p), END, *ids("<|im_start|>")], [*ids(r), END]) for p, r in pairs]
    wanted = [([*p, *r], list(range(len(p), len(p) + len(r)))) for p, r in texts]
    assert [(tokens, actions) for role, tokens, actions in asked if role == "policy"] == wanted
    assert [(tokens, actions) for role, tokens, actions in asked[3:] if role == "reference"] == wanted


def test_the_baseline_is_never_negative():
    examples = kto_examples()
    trainer = FakeTrainer(vocabulary=64)
    trainer._logits[ids("0")[0]] = trainer._logits[ids("1")[0]] = trainer._logits[ids("2")[0]] = -5
    form = Form("sequence", with_reference=True, with_baseline=True)
    learned = lesson_of(examples, form).prepare("k", [e.prompt for e in examples], trainer)
    assert [s.preference.baseline for s in learned.sequences] == [0.0] * 3


def test_prompts_and_responses_of_other_rows_must_fit_together():
    examples = kto_examples()
    longest = max(len(PROMPT), len(ids("use 1")) + 2) + 5
    check_mismatched(examples, longest)
    with pytest.raises(ConfigError, match=rf"the response of s/2 \(5\) need {longest}, and a micro-batch holds"):
        check_mismatched(examples, longest - 1)
    check_mismatched([], 1)


def test_held_out_loss_is_that_of_all_rows_as_one_batch():
    examples = kto_examples()
    trainer = trained(examples)
    found = lesson_of(examples, Form()).evaluate("held-out", [e.prompt for e in examples], trainer)
    table = trainer._logits - np.log(np.exp(trainer._logits).sum())
    tokens = [t for text in ("00", "1", "2222") for t in [*ids(text), END]]
    assert found.keys() == {"loss"}
    assert found["loss"].value == pytest.approx(-np.mean([table[t] for t in tokens]))


def test_score_statistics_are_over_both_responses():
    examples = [maker().pair(read(pair, **PAIR, id=str(n)), at="last") for n in range(3)]
    sequences = [s for e in examples for s in e.sequences]
    values = {s.id: np.asarray([n], dtype=np.float32) for n, s in enumerate(sequences)}
    trainer = SimpleNamespace(num_ranks=1, logprobs=lambda plan, role: [values[s.id] for s in plan.sequences])
    assert score_statistics(examples, trainer, 500) == pytest.approx((2.5, np.std(np.arange(6))))


def test_scores_without_spread_are_not_stored(tmp_path, caplog):
    (tmp_path / "config.json").write_text('{"a": 1}')
    _store_scores(tmp_path, 0.5, 0.0)
    assert json.loads((tmp_path / "config.json").read_text()) == {"a": 1}
    assert "no mean and standard deviation are stored" in caplog.text
    _store_scores(tmp_path, 0.5, 2.0)
    found = json.loads((tmp_path / "config.json").read_text())
    assert found == {"a": 1, "skirl_reward_mean": 0.5, "skirl_reward_std": 2.0}


def test_the_table_of_held_out_losses():
    records = [
        {"step": 0, "eval/a/loss": 0.7, "eval/a/accuracy": 0.5, "eval/a/error_rate": 0.1},
        {"step": 1, "sft/loss": 3.0},
        {"step": 2, "eval/a/loss": 0.2, "eval/a/accuracy": 0.9},
        {"step": 4, "eval/a/loss": 0.3, "eval/a/accuracy": 0.8},
    ]
    table = loss_table(records)
    rows = list(zip(*(column.cells for column in table.columns), strict=True))
    assert rows == [
        ("a, loss", "0.7000 (step 0)", "0.2000 (step 2)", "0.3000 (step 4)"),
        ("a, accuracy", "0.5000 (step 0)", "0.9000 (step 2)", "0.8000 (step 4)"),
    ]


# --------------------------------------------------------------------------------------------------------------- sample
def scored(*responses: tuple[str, float | None, str], media: tuple[Media, ...] = ()) -> ScoredGroup:
    """Responses as (text, score, finish reason)."""
    turns = ({"role": "user", "content": "say 0"},)
    prompt = Prompt("s/1", "s", tuple(PROMPT), tuple(PROMPT), media, "00", None, "00", {"messages": turns})
    empty = np.empty(0, dtype=np.int64)
    rollouts = tuple(
        Rollout("s/1", n, empty, np.arange(len(text)), np.empty(0, dtype=np.float32), empty, finish, text)
        for n, (text, _, finish) in enumerate(responses)
    )
    scores = tuple(
        Score(score, {"part": score}) if score is not None else Score(None, failure=ScoreFailure("raised", "why"))
        for _, score, _ in responses
    )
    return ScoredGroup(Group(prompt, rollouts, Sampling()), scores)


GROUP = scored(("0", 0.5, "stop"), ("00", 1.0, "stop"), ("0000", 2.0, "length"), ("", 0.2, "stop"), ("9", None, "stop"))


def chosen(select: str, group: ScoredGroup = GROUP, **settings: Any) -> list[dict[str, Any]]:
    return select_rows(group, SampleConfig(select=select, **settings))


def test_every_response_with_its_score_or_why_there_is_none():
    rows = chosen("all")
    assert [row["id"] for row in rows] == [f"s/1#{n}" for n in range(5)]
    assert rows[1] == {
        "id": "s/1#1",
        "prompt_id": "s/1",
        "prompt": [{"role": "user", "content": "say 0"}],
        "response": "00",
        "score": 1.0,
        "parts": {"part": 1.0},
        "finish_reason": "stop",
        "sample_index": 1,
    }
    assert (rows[4]["score"], rows[4]["failure"]) == (None, "raised: why")


def test_what_is_taught_ended_by_itself_and_says_something():
    assert [row["response"] for row in chosen("best")] == ["00"]
    assert [row["response"] for row in chosen("rejection", min_score=0.1)] == ["0", "00"]
    assert chosen("rejection", min_score=1.5) == []
    (row,) = chosen("pairs")
    assert (row["chosen"], row["rejected"], row["margin"]) == ("00", "", 0.8)
    assert chosen("pairs", scored(("0", 1.0, "stop"), ("1", 1.0, "stop"))) == []
    assert chosen("best", scored(("0", 1.0, "length"), ("1", None, "stop"))) == []


def test_rows_are_read_by_the_commands_that_learn_from_them():
    found = read(pair, **chosen("pairs")[0])
    assert (found.chosen[0]["content"], found.rejected[0]["content"], found.margin) == ("00", "", 0.8)
    assert read(conversation, **chosen("best")[0]).row.text == "00"


def test_clips_are_named_by_their_files():
    (row,) = chosen("best", scored(("hi", 1.0, "stop"), media=(Media("/a.wav", 1.0, 2.5),)))
    assert {name: row[name] for name in ("audio", "start", "end", "text")} == {
        "audio": "/a.wav",
        "start": 1.0,
        "end": 3.5,
        "text": "hi",
    }
    with pytest.raises(DataError, match="s/1: its clip lies in a table"):
        chosen("best", scored(("hi", 1.0, "stop"), media=(Media("x", data=b"1"),)))


def test_what_belongs_to_a_clips_prompt_is_kept():
    """Without its context a response would be learned as the answer to another prompt."""
    group = scored(("hi", 1.0, "stop"), ("language French<asr_text>salut", 0.5, "stop"), media=(Media("/a.wav"),))
    row = {"context": "a call", "keywords": ("hi",), "language": "English"}
    group = replace(group, group=replace(group.group, prompt=replace(group.group.prompt, row=row, language="English")))
    plain, tagged = chosen("all", group)
    assert {name: plain[name] for name in row} == {"context": "a call", "keywords": ["hi"], "language": "English"}
    assert "language" not in tagged  # it says its own
    found = [audio_row(SOURCE, record, where="rows.jsonl:1", folder=Path("/")) for record in (plain, tagged)]
    assert [(r.text, r.language) for r in found] == [("hi", "English"), ("salut", "French")]
    assert [(r.context, r.keywords) for r in found] == [("a call", ("hi",))] * 2


def test_a_failed_sample_takes_its_group_along_where_the_recipe_says_so():
    """reward.on_failure drop_group: what is best of a group that is not whole is not known."""
    for select in ("best", "rejection", "pairs"):
        assert select_rows(GROUP, SampleConfig(select=select), whole_groups=True) == []
    assert len(select_rows(GROUP, SampleConfig(select="all"), whole_groups=True)) == 5
    whole = scored(("0", 0.5, "stop"), ("00", 1.0, "stop"))
    assert len(select_rows(whole, SampleConfig(select="best"), whole_groups=True)) == 1


def test_a_sample_file_goes_on_where_it_stopped(tmp_path):
    path = tmp_path / "out" / "rows.jsonl"
    file = SampleFile(path, resume=False)
    file.add("a", [{"prompt_id": "a", "n": 1}, {"prompt_id": "a", "n": 2}])
    file.add("b", [])
    with path.open("a") as torn:  # killed after the rows of c, before c was listed, within those of d
        torn.write('{"prompt_id": "c", "n": 3}\n{"prompt_id": "d"')
    again = SampleFile(path, resume=True)
    assert (again.done, again.num_rows) == ({"a", "b"}, 2)
    again.add("c", [{"prompt_id": "c", "n": 3}])
    assert [json.loads(line)["n"] for line in path.read_text().splitlines()] == [1, 2, 3]
    assert again.num_rows == 3


def test_a_run_that_kept_nothing_is_not_gone_on_with_unasked(tmp_path):
    """Its prompts are listed as done: another run with a lower bar would find nothing left to sample."""
    path = tmp_path / "rows.jsonl"
    SampleFile(path, resume=False).add("a", [])
    assert path.stat().st_size == 0
    with pytest.raises(ConfigError, match=r"rows\.jsonl exists already: set run\.resume"):
        SampleFile(path, resume=False)
    assert SampleFile(path, resume=True).done == {"a"}


def test_files_of_others_are_not_written_over(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("{}\n")
    with pytest.raises(ConfigError, match=r"rows\.jsonl exists already: set run\.resume"):
        SampleFile(path, resume=False)
    with pytest.raises(ConfigError, match="was not written by skirl sample"):
        SampleFile(path, resume=True)
    path.write_text("")
    assert SampleFile(path, resume=False).num_rows == 0
    with pytest.raises(ConfigError, match=r"sample\.output: .*jsonl/below cannot be written \(.*\); choose another"):
        SampleFile(path / "below", resume=False)


def test_metrics_of_samples():
    found = {name: ratio.value for name, ratio in measure_samples([GROUP], 2.0, 7).items()}
    assert found["rollout/truncation_rate"] == pytest.approx(0.2)
    assert found["reward/mean"] == pytest.approx(3.7 / 4)
    assert found["reward/failure_rate"] == pytest.approx(0.2)
    assert found["sample/rows"] == 7
    assert measure_samples([scored(("9", None, "stop"))], 2.0, 7)["reward/failure_rate"].value == 1.0
