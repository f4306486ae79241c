"""Families: what the encoder gets and gives, token counts, prompts and parsers, against transformers' own classes."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from skirl.errors import DataError, ModelError
from skirl.models.families import FAMILIES, TEXT, ParsedAnswer
from skirl.models.loading import load_model
from skirl.testing import tiny_models

BUILDERS = {
    "qwen3_asr": tiny_models.tiny_qwen3_asr,
    "qwen2_audio": tiny_models.tiny_qwen2_audio,
    "glmasr": tiny_models.tiny_glm_asr,
    "voxtral": tiny_models.tiny_voxtral,
    "audioflamingo3": tiny_models.tiny_audio_flamingo_3,
}
LENGTHS = (4800, 15999, 16000, 16001, 16160, 37912, 79999, 80000, 80100, 95999, 96001, 127999, 128000, 192000)


@pytest.fixture(scope="module", params=sorted(BUILDERS))
def loaded(request, tmp_path_factory):
    torch.set_num_threads(1)
    return load_model(BUILDERS[request.param](tmp_path_factory.mktemp(request.param)), dtype="float32")


@pytest.fixture(scope="module")
def qwen3_asr(tmp_path_factory):
    return load_model(tiny_models.tiny_qwen3_asr(tmp_path_factory.mktemp("asr")), dtype="float32")


def noise(num_samples: int, seed: int = 0) -> np.ndarray:
    tone = np.sin(np.arange(num_samples) * (0.05 + 0.01 * seed))
    return (0.1 * np.random.default_rng(seed).standard_normal(num_samples) + 0.2 * tone).astype(np.float32)


def transformers_inputs(loaded, samples: np.ndarray) -> dict[str, torch.Tensor]:
    """Ids and features by the model's own processor, for our prompt."""
    family, processor = loaded.family, loaded.processor
    padded = np.pad(samples, (0, max(0, family.min_samples - len(samples))))
    prompt = family.prompt(context="", force_language=None)
    if family.model_type != "voxtral":
        return dict(processor(text=[prompt], audio=[padded], return_tensors="pt"))
    window = processor.feature_extractor.n_samples  # its own prompts need mistral-common
    mel = processor._retrieve_input_features(
        [padded], window // 160, sampling_rate=16000, padding=True, truncation=False, pad_to_multiple_of=window,
        return_tensors="pt",
    )  # fmt: skip
    ids = family.tokenize(loaded.tokenizer, prompt)
    at = ids.index(24)
    per_window = loaded.config.audio_config.max_source_positions // 4
    ids[at : at + 1] = [24] * (per_window * len(mel))
    return {"input_ids": torch.tensor([ids]), "input_features": mel}


@torch.no_grad()
def transformers_rows(loaded, samples: np.ndarray) -> torch.Tensor:
    """The embeddings that the model itself puts at the placeholders."""
    inputs = transformers_inputs(loaded, samples)
    seen = []
    hook = loaded.model.model.language_model.register_forward_pre_hook(
        lambda _module, _args, kwargs: seen.append(kwargs["inputs_embeds"]), with_kwargs=True
    )
    loaded.model(**inputs)
    hook.remove()
    return seen[0][inputs["input_ids"] == loaded.config.audio_token_id]


@torch.no_grad()
@pytest.mark.parametrize("num_samples", LENGTHS)
def test_adapter_of_our_rows_is_what_the_model_computes(loaded, num_samples):
    samples = noise(num_samples)
    wanted = transformers_rows(loaded, samples)
    features = loaded.family.features(loaded.processor, samples)
    adapter = loaded.model.get_submodule(loaded.family.roles["adapter"])
    got = adapter(loaded.family.encode(loaded.model, features))
    assert got.shape == wanted.shape
    assert got.shape[0] == loaded.family.num_tokens(loaded.config, num_samples)
    torch.testing.assert_close(got, wanted, atol=1e-6, rtol=0)


def test_count_is_the_processors_for_every_rest(loaded):
    for num_samples in (*range(15990, 17300, 61), *range(95900, 97300, 83)):
        ids = transformers_inputs(loaded, noise(num_samples))["input_ids"]
        wanted = int((ids == loaded.config.audio_token_id).sum())
        assert loaded.family.num_tokens(loaded.config, num_samples) == wanted, num_samples


@torch.no_grad()
def test_clips_encoded_together_are_as_alone(loaded):
    clips = [noise(n, seed) for seed, n in enumerate((16000, 150000, 4800, 130000))]
    features = [loaded.family.features(loaded.processor, clip) for clip in clips]
    together = loaded.family.encode_many(loaded.model, features)
    assert [len(rows) for rows in together] == [loaded.family.num_tokens(loaded.config, len(clip)) for clip in clips]
    for rows, alone in zip(together, features, strict=True):
        torch.testing.assert_close(rows, loaded.family.encode(loaded.model, alone), atol=1e-5, rtol=0)


def test_features_do_not_depend_on_calls_before(loaded):
    first = loaded.family.features(loaded.processor, noise(20000))
    loaded.family.features(loaded.processor, noise(50000, seed=3))
    again = loaded.family.features(loaded.processor, noise(20000))
    assert set(first) == {"input_features", "input_features_mask"}
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_gradient_reaches_the_encoder(loaded):
    features = loaded.family.features(loaded.processor, noise(20000))
    loaded.family.encode(loaded.model, features).square().sum().backward()
    encoder = loaded.model.get_submodule(loaded.family.roles["encoder"])
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in encoder.parameters())
    loaded.model.zero_grad()


def test_a_trained_encoder_is_called_once_however_many_clips_there_are(loaded):
    """Ranks that train one together (ZeRO-3) gather its weights at each call: all must call it equally often."""
    tower, calls = loaded.model.get_submodule(loaded.family.roles["encoder"]), []
    features = [loaded.family.features(loaded.processor, noise(4800))] * 33
    hook = tower.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        rows = loaded.family.encode_many(loaded.model, features)
    assert len(calls) == 1
    tower.requires_grad_(False)
    with torch.no_grad():
        frozen = loaded.family.encode_many(loaded.model, features)
    tower.requires_grad_(True)
    hook.remove()
    assert len(rows) == len(frozen) == 33
    assert max(float((a - b).abs().max()) for a, b in zip(rows, frozen, strict=True)) < 1e-5


def test_a_frozen_encoder_hears_many_clips_in_parts(qwen3_asr, monkeypatch):
    """What its convolutions hold grows with all that goes through at once."""
    monkeypatch.setattr("skirl.models.qwen3_asr.FRAMES_A_PASS", 300)
    tower, calls = qwen3_asr.model.get_submodule(qwen3_asr.family.roles["encoder"]), []
    features = [qwen3_asr.family.features(qwen3_asr.processor, noise(16000 * n)) for n in (2, 1, 1, 4, 1, 1)]
    whole = [qwen3_asr.family.encode(qwen3_asr.model, one) for one in features]
    tower.requires_grad_(False)
    hook = tower.register_forward_hook(lambda _, __, out: calls.append(out.last_hidden_state.shape[-2] / 13))
    rows = qwen3_asr.family.encode_many(qwen3_asr.model, features)
    hook.remove()
    tower.requires_grad_(True)
    assert calls == [3, 1, 4, 2]
    for one, wanted in zip(rows, whole, strict=True):
        torch.testing.assert_close(one, wanted.detach(), atol=1e-5, rtol=0)


def test_control_tokens_are_single_tokens_of_the_tokenizer(loaded):
    family = loaded.family
    assert family.placeholder in family.banned
    for token in (*family.banned, *family.control, family.end):
        assert len(family.tokenize(loaded.tokenizer, token)) == 1
    assert family.tokenize(loaded.tokenizer, family.placeholder) == [loaded.config.audio_token_id]


def test_prompt_has_one_placeholder(loaded):
    for language in (None, "French"):
        ids = loaded.family.tokenize(loaded.tokenizer, loaded.family.prompt(context="", force_language=language))
        assert ids.count(loaded.config.audio_token_id) == 1


def test_control_tokens_in_data_are_refused(loaded):
    if loaded.family.model_type != "voxtral":
        with pytest.raises(DataError, match="control token"):
            loaded.family.prompt(context=f"a {loaded.family.placeholder} b", force_language=None)
    with pytest.raises(DataError, match="control token"):
        loaded.family.answer(text=f"well {loaded.family.end}", language=None, forced=False)


# ------------------------------------------------------------------------------------------------------------ Qwen3-ASR
@pytest.mark.parametrize(("seconds", "tokens"), [(0.3, 13), (1, 13), (1.5, 20), (30, 390), (60, 780), (1200, 15600)])
def test_qwen3_asr_counts_as_released(seconds, tokens):
    config = SimpleNamespace(audio_config=SimpleNamespace(n_window=50))
    assert FAMILIES["qwen3_asr"].num_tokens(config, int(seconds * 16000)) == tokens


def test_clip_that_is_too_long_is_refused(loaded):
    longest = 15.0 if loaded.family.model_type == "qwen2_audio" else loaded.family.max_seconds
    if longest is None:
        return
    loaded.family.num_tokens(loaded.config, int(longest * 16000))
    with pytest.raises(DataError, match=f"longer than the {longest:g} s"):
        loaded.family.num_tokens(loaded.config, int(longest * 16000) + 1)
    if longest == 15.0:
        with pytest.raises(DataError, match="longer than"):
            loaded.family.features(loaded.processor, noise(240001))


@pytest.mark.parametrize("language", [None, "English", "Chinese"])
@pytest.mark.parametrize("context", ["", "Kubernetes, 量子纠缠\nand  two   blanks "])
def test_qwen3_asr_prompt_is_the_processors(qwen3_asr, context, language):
    request = qwen3_asr.processor.apply_transcription_request(
        audio=[noise(24000)], language=[language], prompt=[context or None]
    )
    family = qwen3_asr.family
    ids = family.tokenize(qwen3_asr.tokenizer, family.prompt(context=context, force_language=language))
    pad = qwen3_asr.config.audio_token_id
    at = ids.index(pad)
    ids[at : at + 1] = [pad] * family.num_tokens(qwen3_asr.config, 24000)
    assert ids == request["input_ids"][0].tolist()


def test_qwen3_asr_answer_and_parse_are_inverse():
    family = FAMILIES["qwen3_asr"]
    for text in ("hello there", "", "哈" * 50, "no " * 49 + "no", "1 < 2 <b>"):
        for language in ("English", "Chinese", None):
            answer = family.answer(text=text, language=language, forced=False)
            assert family.parse(answer, forced_language=None) == ParsedAnswer(language, text)
            bare = family.answer(text=text, language=language, forced=True)
            assert bare == text
            assert family.parse(bare, forced_language="Thai") == ParsedAnswer("Thai", text)
    assert family.answer(text="hi", language="English", forced=False) == "language English<asr_text>hi"
    assert family.answer(text="", language=None, forced=False) == "language None<asr_text>"


@pytest.mark.parametrize(
    ("text", "language", "transcript"),
    [
        ("", None, ""),
        ("no tag at all", None, "no tag at all"),
        ("language English", None, "language English"),
        ("<asr_text>words", None, "words"),
        ("English<asr_text>words", None, "words"),
        ("languageEnglish<asr_text>words", None, "words"),
        ("language <asr_text>words", None, "words"),
        ("language English\nlanguage French<asr_text>words", None, "words"),
        ("Language  English <asr_text> words\n", "English", "words"),
        ("language none<asr_text>", None, ""),
        ("language English<asr_text>a<asr_text>b", "English", "a<asr_text>b"),
        ("language " + "English " * 50 + "<asr_text>x", ("English " * 50).strip(), "x"),
    ],
)
def test_qwen3_asr_parses_malformed_text(text, language, transcript):
    assert FAMILIES["qwen3_asr"].parse(text, forced_language=None) == ParsedAnswer(language, transcript)


def test_tag_after_a_forced_language_stays_visible():
    parsed = FAMILIES["qwen3_asr"].parse("language English<asr_text>x", forced_language="English")
    assert parsed == ParsedAnswer("English", "language English<asr_text>x")


def test_answer_survives_decoding_without_special_tokens(qwen3_asr):
    answer = qwen3_asr.family.answer(text="zwölf 十二", language="German", forced=False)
    ids = qwen3_asr.family.tokenize(qwen3_asr.tokenizer, answer + qwen3_asr.family.end)
    assert qwen3_asr.tokenizer.decode(ids, skip_special_tokens=True) == answer


# --------------------------------------------------------------------------------------------------------------- others
@pytest.mark.parametrize("model_type", ["glmasr", "audioflamingo3"])
def test_prompt_is_the_processors_request(model_type, tmp_path):
    loaded = load_model(BUILDERS[model_type](tmp_path), dtype="float32")
    request = loaded.processor.apply_transcription_request(audio=[noise(24000)])
    ids = request["input_ids"][0].tolist()
    pad = loaded.config.audio_token_id
    compact = [token for i, token in enumerate(ids) if token != pad or ids[i - 1] != pad]
    ours = loaded.family.tokenize(loaded.tokenizer, loaded.family.prompt(context="", force_language=None))
    assert compact == ours


def test_qwen2_audio_prompt_is_the_class_template(tmp_path):
    loaded = load_model(tiny_models.tiny_qwen2_audio(tmp_path), dtype="float32")
    turn = [{"type": "audio", "audio": None}, {"type": "text", "text": "Transcribe the audio into text."}]
    text = loaded.processor.apply_chat_template(
        [{"role": "user", "content": turn}], add_generation_prompt=True, tokenize=False
    )
    assert loaded.family.prompt(context="", force_language=None) == text


def test_voxtral_prompt():
    family = FAMILIES["voxtral"]
    assert family.prompt(context="", force_language=None) == "<s>[INST][BEGIN_AUDIO][AUDIO][/INST][TRANSCRIBE]"
    assert family.prompt(context="", force_language="French").endswith("[/INST]lang:fr[TRANSCRIBE]")
    with pytest.raises(DataError, match="no place"):
        family.prompt(context="hot words", force_language=None)
    with pytest.raises(DataError, match="'Klingon'"):
        family.prompt(context="", force_language="Klingon")


def test_context_and_language_are_part_of_the_instruction():
    for model_type in ("qwen2_audio", "glmasr", "audioflamingo3"):
        prompt = FAMILIES[model_type].prompt(context="hot words", force_language="French")
        assert "French" in prompt
        assert "\nContext: hot words<|" in prompt


def test_plain_families_keep_the_text():
    for model_type in ("qwen2_audio", "glmasr", "voxtral", "audioflamingo3"):
        family = FAMILIES[model_type]
        text = "哈" * 50
        assert family.parse(
            f" {family.answer(text=text, language='Chinese', forced=False)}\n", forced_language=None
        ) == (ParsedAnswer(None, text))
        assert family.parse("a <asr_text> b", forced_language="Thai") == ParsedAnswer("Thai", "a <asr_text> b")


def test_audio_flamingo_unwraps_its_sentence():
    parse = FAMILIES["audioflamingo3"].parse
    assert parse("The spoken content of the audio is 'it's here'.", forced_language=None).transcript == "it's here"
    assert parse('The content of the input audio is "a"', forced_language=None).transcript == "a"
    assert parse("The spoken content of the audio is unclear.", forced_language=None).transcript == (
        "The spoken content of the audio is unclear."
    )
    assert parse("'quoted'.", forced_language=None).transcript == "'quoted'."


def test_text_models_hear_nothing():
    with pytest.raises(ModelError, match="hears no audio"):
        TEXT.features(None, noise(10))
    assert TEXT.placeholder is None
    assert TEXT.parse(" 42 \n", forced_language=None) == ParsedAnswer(None, "42")
