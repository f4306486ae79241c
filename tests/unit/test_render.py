"""Rows to prompts and rollouts to samples: ids as the model's own processor makes them, answers, refusals."""

from dataclasses import replace

import numpy as np
import pytest

from skirl.errors import DataError
from skirl.models.loading import load_tokenizer_and_family
from skirl.prompts.decode import load_clip
from skirl.records import Group, Media, Rollout, Row, Sampling
from skirl.rollouts.parse import sample_maker
from tests import tiny

SECONDS = (0.3, 0.5, 0.99, 1.0, 1.01, 1.5, 2.0, 2.37, 3.0)


@pytest.fixture(scope="module")
def speech(checkpoints):
    return load_tokenizer_and_family(checkpoints["native"])


@pytest.fixture(scope="module")
def text(checkpoints):
    return load_tokenizer_and_family(checkpoints["tied"])


def ids(files, string):
    return tuple(files.tokenizer(string, add_special_tokens=False)["input_ids"])


def row(**changes):
    return replace(tiny.speech_row(0), **changes)


# --------------------------------------------------------------------------------------------------------------- speech
@pytest.mark.parametrize("seconds", SECONDS)
@pytest.mark.parametrize("forced", [False, True])
def test_expanded_ids_are_those_of_the_processor(speech, seconds, forced):
    """``apply_transcription_request`` on the same padded clip, with a context and without."""
    clip = tiny.clip(0, seconds)
    samples = load_clip(clip, speech.family.min_samples)
    for context in ("", "names: Norland, Dashwood"):
        made = tiny.renderer_of(speech, forced=forced).prompt(row(media=(clip,), context=context, language="Chinese"))
        wanted = speech.processor.apply_transcription_request(
            audio=samples, language="Chinese" if forced else None, prompt=context or None
        )
        assert list(made.input_ids) == wanted["input_ids"][0].tolist()
        assert made.compact_ids.count(speech.config.audio_token_id) == 1
        run = made.input_ids.count(speech.config.audio_token_id)
        assert len(made.input_ids) == len(made.compact_ids) + run - 1
        assert run == max(13, speech.family.num_tokens(speech.config, len(samples)))


def test_tagged_and_forced(speech):
    tagged = tiny.renderer_of(speech).prompt(row(text="hi", language="English"))
    forced = tiny.renderer_of(speech, forced=True).prompt(row(text="hi", language="English"))
    assert tagged.answer == "language English<asr_text>hi"
    assert forced.answer == "hi"
    assert forced.input_ids == tagged.input_ids + ids(speech, "language English<asr_text>")
    assert tagged.compact_ids[-3:] == ids(speech, "<|im_start|>assistant\n")[-3:]
    unknown = tiny.renderer_of(speech).prompt(row(text="hi", language=None))
    assert unknown.answer == "language None<asr_text>hi"
    with pytest.raises(DataError, match=r"made\.jsonl:0: row clip0 names no language, but data\.prompt is forced"):
        tiny.renderer_of(speech, forced=True).prompt(row(language=None))


def test_what_a_prompt_carries(speech):
    made = tiny.renderer_of(speech).prompt(
        row(text="hi", keywords=("Norland",), extra={"speaker": "f1", "text": "not this", "media": 3})
    )
    assert (made.id, made.source, made.reference, made.language) == ("made/clip0", "made", "hi", "English")
    assert made.media == row().media
    assert made.seconds == 0.4
    wanted = {"speaker": "f1", "text": "hi", "id": "clip0", "keywords": ("Norland",), "language": "English", "media": 3}
    assert {name: made.row[name] for name in wanted} == wanted
    assert made.row["where"] == "made.jsonl:0"


def test_order_of_rows_is_kept(speech):
    made = tiny.renderer_of(speech).prompts([tiny.speech_row(n) for n in (3, 0, 2)])
    assert [p.id for p in made] == ["made/clip3", "made/clip0", "made/clip2"]


def test_targets_end_with_the_end_token(speech, text):
    renderer = tiny.renderer_of(speech)
    target = renderer.target(renderer.prompt(row(text="Grüße 你好", language="Chinese")))
    assert tuple(target) == ids(speech, "language Chinese<asr_text>Grüße 你好<|im_end|>")
    assert target[-1] == speech.config.eos_token_id[1]
    assert speech.tokenizer.decode(target[:-1]) == "language Chinese<asr_text>Grüße 你好"
    empty = renderer.prompt(row(text="", language=None, no_speech=True))
    assert tuple(renderer.target(empty)) == ids(speech, "language None<asr_text><|im_end|>")
    silent = renderer.prompt(row(text="", language="Chinese", no_speech=True))  # of a source that is all Chinese
    assert tuple(renderer.target(silent)) == tuple(renderer.target(empty))
    renderer = tiny.renderer_of(text)
    prompt = renderer.prompt(Row("a", "made", messages=({"role": "user", "content": "2+2"},), text="4"))
    assert tuple(renderer.target(prompt)) == ids(text, "4<|im_end|>")


def test_no_reference_is_no_target(speech):
    renderer = tiny.renderer_of(speech)
    made = renderer.prompt(row(text=None))
    assert made.answer is None
    with pytest.raises(DataError, match="row made/clip0 has no reference text to learn from"):
        renderer.target(made)


@pytest.mark.parametrize("token", ["<|audio_pad|>", "<|im_end|>", "<|audio_start|>"])
def test_control_tokens_in_context_or_reference_are_refused(speech, token):
    renderer = tiny.renderer_of(speech)
    with pytest.raises(DataError, match=rf"^made\.jsonl:0: context .*{token.strip('<|>')}.*control token"):
        renderer.prompt(row(context=f"names {token}"))
    with pytest.raises(DataError, match=r"^made\.jsonl:0: reference text"):
        renderer.prompt(row(text=f"hello {token}"))


def test_two_clips_in_a_row_are_refused(speech):
    clips = (tiny.clip(0, 1.0), tiny.clip(1, 1.0))
    with pytest.raises(DataError, match=r"row clip0 has 2 clips, and Qwen3-ASR hears one a prompt"):
        tiny.renderer_of(speech).prompt(row(media=clips))


def test_clips_that_are_not_there_are_data_errors(speech):
    with pytest.raises(DataError, match=r"gone\.wav: there is no such file"):
        tiny.renderer_of(speech).prompt(row(media=(Media("/nowhere/gone.wav"),)))


# ----------------------------------------------------------------------------------------------------------------- text
def test_text_prompts_are_the_chat_template(text):
    turns = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2? 你好"})
    made = tiny.renderer_of(text).prompt(Row("a", "made", messages=turns))
    wanted = text.tokenizer.apply_chat_template(list(turns), add_generation_prompt=True, return_dict=True)["input_ids"]
    assert list(made.input_ids) == wanted
    assert made.compact_ids == made.input_ids
    assert made.media == ()
    assert made.answer is None


def test_without_a_chat_template_the_turns_are_joined(text):
    from copy import deepcopy

    bare = text._replace(tokenizer=deepcopy(text.tokenizer))
    bare.tokenizer.chat_template = None
    turns = ({"role": "user", "content": "once upon"}, {"role": "user", "content": "a time"})
    made = tiny.renderer_of(bare).prompt(Row("a", "made", messages=turns))
    assert made.input_ids == ids(text, "once upon\na time")


def test_audio_for_a_text_model_and_the_reverse_are_refused(speech, text):
    with pytest.raises(DataError, match=r"row clip0 holds audio, but the model \(causal language model\) reads text"):
        tiny.renderer_of(text).prompt(row())
    with pytest.raises(DataError, match=r"row clip0 holds no audio, but the model \(Qwen3-ASR\) transcribes audio"):
        tiny.renderer_of(speech).prompt(row(media=()))


# -------------------------------------------------------------------------------------------------------------- parsing
def samples(files, prompt, texts, *, forced):
    rollouts = tuple(
        Rollout(
            prompt.id, 2 * i, np.array(prompt.input_ids), np.array([5, 6, i]), np.zeros(3, dtype=np.float32),
            np.zeros(3, dtype=np.int64), "stop", text,
        )
        for i, text in enumerate(texts)
    )  # fmt: skip
    return sample_maker(files.family, forced=forced)(Group(prompt, rollouts, Sampling()))


def test_rewards_see_raw_text_and_its_parts(speech):
    prompt = tiny.renderer_of(speech).prompt(row(text="hi", language="Chinese"))
    texts = ["language English<asr_text> ha" + "ha" * 50, "no tag", "language None<asr_text>"]
    found = samples(speech, prompt, texts, forced=False)
    assert [s.text for s in found] == texts
    assert [(s.language, s.transcript) for s in found] == [("English", "ha" + "ha" * 50), (None, "no tag"), (None, "")]
    assert [(s.id, s.index, s.finish_reason) for s in found] == [("made/clip0", i, "stop") for i in (0, 2, 4)]
    assert [s.response_ids for s in found] == [(5, 6, 0), (5, 6, 1), (5, 6, 2)]
    assert {(s.reference, s.reference_language, s.seconds) for s in found} == {("hi", "Chinese", 0.4)}
    assert found[0].row is prompt.row


def test_a_forced_language_is_the_answers_language(speech):
    prompt = tiny.renderer_of(speech, forced=True).prompt(row(text="hi", language="Chinese"))
    bare, tagged = samples(speech, prompt, [" hi ", "language English<asr_text>hi"], forced=True)
    assert (bare.language, bare.transcript) == ("Chinese", "hi")
    assert tagged.transcript == "language English<asr_text>hi"  # the mistake stays visible
