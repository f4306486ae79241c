"""Export: what is written loads by plain transformers, in every layout, bit for bit."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from skirl.errors import ModelError
from skirl.models import checkpoints
from skirl.models.loading import export_model, load_model, set_trainable
from skirl.testing import tiny_models

BUILDERS = {
    "native": tiny_models.tiny_qwen3_asr,
    "original": lambda directory: tiny_models.tiny_qwen3_asr(directory, original_layout=True),
    "qwen2_audio": tiny_models.tiny_qwen2_audio,
    "glmasr": tiny_models.tiny_glm_asr,
    "voxtral": tiny_models.tiny_voxtral,
    "audioflamingo3": tiny_models.tiny_audio_flamingo_3,
    "tied": tiny_models.tiny_qwen3,
    "untied": lambda directory: tiny_models.tiny_qwen3(directory, tied=False),
}
SAMPLES = (0.1 * np.random.default_rng(0).standard_normal(30000)).astype(np.float32)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("built")
    return {name: build(root / name) for name, build in BUILDERS.items()}


@torch.no_grad()
def logits(model, loaded):
    """Of a text, and for audio models of a clip with our prompt, through the model's own forward."""
    if loaded.processor is None:
        return model(input_ids=torch.arange(30, 50)[None]).logits
    family = loaded.family
    features = family.features(loaded.processor, SAMPLES)
    ids = family.tokenize(loaded.tokenizer, family.prompt(context="", force_language="English"))
    at = ids.index(loaded.config.audio_token_id)
    ids[at : at + 1] = [loaded.config.audio_token_id] * family.num_tokens(loaded.config, len(SAMPLES))
    if family.model_type == "qwen3_asr":
        features = {name: value[None] for name, value in features.items()}
    mask = features.pop("input_features_mask")
    name = {"voxtral": None, "qwen2_audio": "feature_attention_mask"}.get(family.model_type, "input_features_mask")
    if name:
        features[name] = mask
    return model(input_ids=torch.tensor([ids]), **features).logits


def plain_transformers(directory, loaded):
    """What a user of the export does."""
    import transformers

    auto = {"tied": "AutoModelForCausalLM", "audioflamingo3": "AutoModelForSeq2SeqLM"}
    name = "AutoModelForCausalLM" if loaded.processor is None else "AutoModelForMultimodalLM"
    model, info = getattr(transformers, auto.get(loaded.family.model_type, name)).from_pretrained(
        directory, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model.eval()


def trained(loaded):
    """A state dict that differs from what was loaded in every trained tensor; tied ones once."""
    set_trainable(loaded.model, loaded.family, ["encoder"])
    generator = torch.Generator().manual_seed(1)
    for _, parameter in loaded.model.named_parameters():
        if parameter.requires_grad:
            parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator)
    return {name: p.detach() for name, p in loaded.model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("name", [name for name in BUILDERS if name != "original"])
def test_export_loads_by_plain_transformers_with_equal_logits(built, tmp_path, name):
    loaded = load_model(built[name], dtype="float32")
    before = logits(loaded.model, loaded)
    export_model(loaded, trained(loaded), tmp_path / "out", "same")
    wanted = logits(loaded.model, loaded)
    assert not torch.allclose(before, wanted)
    assert torch.equal(logits(plain_transformers(tmp_path / "out", loaded), loaded), wanted)
    assert {p.name for p in (tmp_path / "out").iterdir()} == {p.name for p in built[name].iterdir()}
    again = load_model(tmp_path / "out", dtype="float32")
    assert torch.equal(logits(again.model, again), wanted)
    assert again.tokenizer.get_vocab() == loaded.tokenizer.get_vocab()


@pytest.mark.parametrize("name", ["qwen2_audio", "glmasr", "voxtral", "audioflamingo3"])
def test_tensor_names_on_disk_are_the_released_ones(built, tmp_path, name):
    """Not those of save_pretrained, which in transformers 5.19 writes language_model.model.model for these."""
    loaded = load_model(built[name], dtype="float32")
    export_model(loaded, loaded.model.state_dict(), tmp_path, "same")
    starts = ("audio_tower.", "multi_modal_projector.", "language_model.model.layers.", "language_model.model.norm.")
    starts += ("language_model.model.embed_tokens.", "language_model.lm_head.")
    names = load_file(tmp_path / "model.safetensors").keys()
    assert not [name for name in names if not name.startswith(starts)]
    assert len(names) == len(list(loaded.model.named_parameters()))


def test_layouts_of_qwen3_asr_convert_both_ways_bit_for_bit(built, tmp_path):
    native = load_model(built["native"], dtype="float32")
    wanted = logits(native.model, native)
    export_model(native, native.model.state_dict(), tmp_path / "original", "original")
    original = load_model(tmp_path / "original", dtype="float32")
    assert original.layout == "original"
    assert torch.equal(logits(original.model, original), wanted)
    export_model(original, original.model.state_dict(), tmp_path / "native", "native")
    export_model(original, original.model.state_dict(), tmp_path / "again", "same")

    first, back = load_file(built["native"] / "model.safetensors"), load_file(tmp_path / "native/model.safetensors")
    assert first.keys() == back.keys()
    assert all(torch.equal(first[name], back[name]) for name in first)
    first, again = (load_file(tmp_path / name / "model.safetensors") for name in ("original", "again"))
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert torch.equal(logits(plain_transformers(tmp_path / "native", native), native), wanted)


def test_config_converts_both_ways(built, tmp_path):
    native = load_model(built["native"], dtype="float32")
    export_model(native, native.model.state_dict(), tmp_path / "original", "original")
    original = load_model(tmp_path / "original", dtype="float32")
    mine, back = native.config.to_dict(), original.config.to_dict()
    # pad is not part of the original config; it is never asked
    no_ids = {"_name_or_path", "architectures", "pad_token_id"}
    assert {k: v for k, v in mine.items() if k not in no_ids} == {k: v for k, v in back.items() if k not in no_ids}
    assert original.model.generation_config.to_dict() == native.model.generation_config.to_dict()


def test_original_layout_is_complete(built):
    directory = built["original"]
    raw = json.loads((directory / "config.json").read_text())
    thinker = raw["thinker_config"]
    assert raw["model_type"] == "qwen3_asr"
    assert thinker["text_config"]["rope_scaling"]["mrope_section"] == [4, 2, 2]  # half of the head dimension
    assert len(raw["support_languages"]) == 30
    names = set(load_file(directory / "model.safetensors"))
    assert all(name.startswith("thinker.") for name in names)
    assert {"thinker.audio_tower.proj1.bias", "thinker.audio_tower.proj2.weight", "thinker.lm_head.weight"} <= names
    assert json.loads((directory / "preprocessor_config.json").read_text())["feature_extractor_type"] == (
        "WhisperFeatureExtractor"
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.json", "generation_config.json"):
        assert (directory / name).is_file()


def test_native_export_of_an_original_checkpoint_transcribes_by_the_processor_alone(built, tmp_path):
    from transformers import AutoProcessor

    loaded = load_model(built["original"], dtype="float32")
    export_model(loaded, loaded.model.state_dict(), tmp_path, "native")
    processor = AutoProcessor.from_pretrained(tmp_path)
    inputs = processor.apply_transcription_request(audio=[SAMPLES], language=["English"])
    model = plain_transformers(tmp_path, loaded)
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, logits(loaded.model, loaded))
    assert model.generation_config.eos_token_id == loaded.model.generation_config.eos_token_id
    assert str(built["original"]) not in (tmp_path / "config.json").read_text()


def test_names_of_the_release():
    pairs = {
        "model.audio_tower.conv2d1.weight": "thinker.audio_tower.conv2d1.weight",
        "model.audio_tower.layers.3.self_attn.q_proj.bias": "thinker.audio_tower.layers.3.self_attn.q_proj.bias",
        "model.multi_modal_projector.linear_1.weight": "thinker.audio_tower.proj1.weight",
        "model.multi_modal_projector.linear_2.bias": "thinker.audio_tower.proj2.bias",
        "model.language_model.layers.0.mlp.up_proj.weight": "thinker.model.layers.0.mlp.up_proj.weight",
        "model.language_model.embed_tokens.weight": "thinker.model.embed_tokens.weight",
        "lm_head.weight": "thinker.lm_head.weight",
    }
    assert {name: checkpoints.to_original(name) for name in pairs} == pairs


def test_mrope_sections_are_the_released_ones():
    native = {
        "audio_config": dict.fromkeys(checkpoints._AUDIO_DEFAULTS, 1),
        "text_config": {**checkpoints._TEXT_DEFAULTS, "head_dim": 128, "rope_parameters": {"rope_theta": 1e6}},
        "tie_word_embeddings": True, "audio_token_id": 1, "initializer_range": 0.02, "timestamp_token_id": 2,
    }  # fmt: skip
    raw = checkpoints.original_config(native, {"audio_start": 1, "audio_end": 2, "user": 3})
    assert raw["thinker_config"]["text_config"]["rope_scaling"]["mrope_section"] == [24, 20, 20]


def test_frozen_and_tied_tensors_may_be_left_out_trained_ones_not(built, tmp_path):
    loaded = load_model(built["native"], dtype="float32")
    state = trained(loaded)
    assert not any("audio_tower" in name or "lm_head" in name for name in state)
    export_model(loaded, state, tmp_path / "a", "same")
    export_model(loaded, loaded.model.state_dict(), tmp_path / "b", "same")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    del state["model.language_model.norm.weight"]
    with pytest.raises(ModelError, match=r"model\.language_model\.norm\.weight is missing"):
        export_model(loaded, state, tmp_path / "c", "same")
    with pytest.raises(ModelError, match=r"module\.x is no tensor"):
        export_model(loaded, {**loaded.model.state_dict(), "module.x": torch.ones(1)}, tmp_path / "d", "same")


def test_tied_names_with_other_values_and_other_shapes_are_refused(built, tmp_path):
    loaded = load_model(built["tied"], dtype="float32")
    state = dict(loaded.model.state_dict())
    with pytest.raises(ModelError, match=r"lm_head\.weight is tied"):
        export_model(loaded, {**state, "lm_head.weight": state["lm_head.weight"] + 1}, tmp_path / "a", "same")
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \(0,\)"):
        export_model(loaded, {**state, "model.norm.weight": torch.empty(0)}, tmp_path / "b", "same")
    assert not (tmp_path / "a").exists()
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("layout", ["same", "native", "original"])
def test_dtype_is_the_tensors(built, tmp_path, layout):
    loaded = load_model(built["native"], dtype="float32")
    export_model(loaded, {k: v.bfloat16() for k, v in loaded.model.state_dict().items()}, tmp_path, layout)
    assert {t.dtype for t in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"


def test_text_models_have_one_layout_and_audio_families_no_original(built, tmp_path):
    text = load_model(built["tied"], dtype="float32")
    export_model(text, text.model.state_dict(), tmp_path / "text", "native")
    assert load_model(tmp_path / "text", dtype="float32").layout == "text"
    for name in ("tied", "glmasr"):
        loaded = load_model(built[name], dtype="float32")
        with pytest.raises(ModelError, match="has only native"):
            export_model(loaded, loaded.model.state_dict(), tmp_path / "x", "original")
    with pytest.raises(ModelError, match="export to another one"):
        export_model(text, text.model.state_dict(), built["tied"], "same")


def test_shards(built, tmp_path):
    loaded = load_model(built["original"], dtype="float32")
    tensors = {checkpoints.to_original(name): t for name, t in loaded.model.state_dict().items()}
    checkpoints.copy_assets(built["original"], tmp_path, {"config.json", *checkpoints.ASSETS})
    checkpoints.write_weights(tmp_path, tensors, max_shard_bytes=200_000)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    again = load_model(tmp_path, dtype="float32")
    assert torch.equal(logits(again.model, again), logits(loaded.model, loaded))
    next(tmp_path.glob("model-00002-*")).unlink()
    with pytest.raises(ModelError, match=r"lacks its weights \(model-00002"):
        load_model(tmp_path, dtype="float32")


def test_weights_are_as_readable_as_the_files_beside_them(built, tmp_path):
    loaded = load_model(built["tied"], dtype="float32")
    export_model(loaded, dict(loaded.model.named_parameters()), tmp_path / "out", "same")
    modes = {p.name: p.stat().st_mode for p in (tmp_path / "out").iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]
