"""Loading: whole or an error that names what is wrong; roles, what trains, stop tokens."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from skirl.errors import ConfigError, ModelError
from skirl.models.families import TEXT
from skirl.models.loading import (
    end_id,
    load_model,
    load_tokenizer_and_family,
    parameter_role,
    set_trainable,
    stop_ids,
)
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


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Each checkpoint once; tests that damage one copy it first."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("built")
    return {name: build(root / name) for name, build in BUILDERS.items()}


@pytest.fixture(params=sorted(BUILDERS))
def each(request, built):
    return built[request.param]


def damaged(source, directory, *, tensors=None, **config):
    """A copy whose tensors and config are changed."""
    shutil.copytree(source, directory)
    if tensors is not None:
        file = directory / "model.safetensors"
        save_file(tensors(load_file(source / "model.safetensors")), file, metadata={"format": "pt"})
    if config:
        file = directory / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    return directory


def test_every_checkpoint_loads(each):
    loaded = load_model(each, dtype="float32")
    assert loaded.source == each
    assert not loaded.model.training
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}
    assert sum(p.numel() for p in loaded.model.parameters()) < 500_000
    light = load_tokenizer_and_family(each)
    assert (light.family, light.layout) == (loaded.family, loaded.layout)
    assert light.tokenizer.get_vocab() == loaded.tokenizer.get_vocab()
    assert light.config.to_dict().keys() == loaded.config.to_dict().keys()
    assert (loaded.processor is None) == (loaded.family is TEXT)


def test_values_are_those_of_the_file(built):
    on_disk = load_file(built["native"] / "model.safetensors")
    parameters = dict(load_model(built["native"], dtype="float32").model.named_parameters())
    assert parameters.keys() == on_disk.keys()
    assert all(torch.equal(parameters[name], tensor) for name, tensor in on_disk.items())


def test_bfloat16(built):
    model = load_model(built["native"], dtype="bfloat16").model
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_attention_by_part(built):
    parts = {"text_config": "eager", "audio_config": "sdpa"}
    model = load_model(built["original"], dtype="float32", attn_implementation=parts).model
    assert model.model.language_model.config._attn_implementation == "eager"
    assert model.model.audio_tower.config._attn_implementation == "sdpa"


def test_gradient_checkpointing_changes_no_gradient(built):
    gradients = []
    for checkpointing in (False, True):
        model = load_model(built["tied"], dtype="float32", gradient_checkpointing=checkpointing).model.train()
        calls = []
        model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        model(input_ids=torch.arange(9)[None], use_cache=False).logits.square().sum().backward()
        assert len(calls) == 1 + checkpointing  # recomputed in the backward pass
        gradients.append(model.model.layers[0].mlp.up_proj.weight.grad)
    torch.testing.assert_close(*gradients)


def test_weights_do_not_live_in_the_file(built, tmp_path):
    """Checkpoints are memory-mapped; overwriting one must not reach the model."""
    directory = damaged(built["native"], tmp_path / "copy")
    model = load_model(directory, dtype="float32").model
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    file = directory / "model.safetensors"
    size = file.stat().st_size
    with file.open("r+b") as handle:
        handle.write(b"\xff" * size)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_a_missing_tensor_is_an_error_that_names_it(each, tmp_path):
    victim = next(name for name in load_file(each / "model.safetensors") if "layers.1" in name)
    without = damaged(each, tmp_path / "copy", tensors=lambda t: {k: v for k, v in t.items() if k != victim})
    ending = victim.split("layers.1", 1)[1]
    with pytest.raises(ModelError, match=rf"1 tensors do not fit .*layers\.1{ending} is missing"):
        load_model(without, dtype="float32")


def test_an_unexpected_tensor_is_an_error(each, tmp_path):
    more = damaged(each, tmp_path / "copy", tensors=lambda t: {**t, "adapter.lora_A.weight": torch.zeros(2)})
    with pytest.raises(ModelError, match=r"adapter\.lora_A\.weight is not part of the model"):
        load_model(more, dtype="float32")


def test_recomputed_tables_of_old_checkpoints_are_harmless(built, tmp_path):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    load_model(damaged(built["tied"], tmp_path / "c", tensors=lambda t: {**t, name: torch.zeros(2)}), dtype="float32")


def test_a_tensor_of_another_shape_is_an_error(built, tmp_path):
    for layout, name in (("native", "model.language_model.norm.weight"), ("original", "thinker.model.norm.weight")):
        other = damaged(built[layout], tmp_path / layout, tensors=lambda t, name=name: {**t, name: torch.ones(3)})
        with pytest.raises(ModelError, match=r"norm\.weight has shape \(3,\), the config asks for \(64,\)"):
            load_model(other, dtype="float32")


def test_untied_head_that_is_missing_is_an_error(built, tmp_path):
    without = damaged(
        built["untied"], tmp_path / "copy", tensors=lambda t: {k: v for k, v in t.items() if k != "lm_head.weight"}
    )
    with pytest.raises(ModelError, match=r"lm_head\.weight is missing"):
        load_model(without, dtype="float32")


def test_tied_head_with_other_values_is_an_error(built, tmp_path):
    both = damaged(
        built["tied"],
        tmp_path / "copy",
        tensors=lambda t: {**t, "lm_head.weight": t["model.embed_tokens.weight"] + 1},
    )
    with pytest.raises(ModelError, match="tie_word_embeddings"):
        load_model(both, dtype="float32")


def test_original_without_word_on_tying_goes_by_the_weights(built, tmp_path):
    thinker = json.loads((built["original"] / "config.json").read_text())["thinker_config"]
    del thinker["text_config"]["tie_word_embeddings"]
    with_head = damaged(built["original"], tmp_path / "a", thinker_config=thinker)
    model = load_model(with_head, dtype="float32").model
    assert model.lm_head.weight is not model.model.language_model.embed_tokens.weight
    without = damaged(
        with_head, tmp_path / "b", tensors=lambda t: {k: v for k, v in t.items() if k != "thinker.lm_head.weight"}
    )
    model = load_model(without, dtype="float32").model
    assert model.lm_head.weight is model.model.language_model.embed_tokens.weight


def test_keys_that_an_original_config_leaves_out_have_the_original_defaults(built, tmp_path):
    thinker = json.loads((built["original"] / "config.json").read_text())["thinker_config"]
    for key in ("rope_theta", "rope_scaling", "rms_norm_eps"):
        del thinker["text_config"][key]
    del thinker["audio_config"]["n_window_infer"]
    config = load_tokenizer_and_family(damaged(built["original"], tmp_path / "a", thinker_config=thinker)).config
    assert config.text_config.rope_parameters == {"rope_type": "default", "rope_theta": 5e6}
    assert config.audio_config.n_window_infer == 400
    assert config.text_config.rms_norm_eps == 1e-6


# --------------------------------------------------------------------------------------------------------- wrong inputs
def test_what_is_no_local_directory(tmp_path):
    with pytest.raises(ModelError, match=r"Qwen/Qwen3-ASR-0\.6B is no directory .*hf download Qwen/Qwen3-ASR-0\.6B"):
        load_model("Qwen/Qwen3-ASR-0.6B", dtype="float32")
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_model(tmp_path, dtype="float32")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="LoRA adapter"):
        load_model(tmp_path, dtype="float32")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read as JSON"):
        load_model(tmp_path, dtype="float32")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "model_type None is not supported.*qwen3_asr"),
        ({"model_type": "warbler"}, "model_type 'warbler' is not supported"),
        ({"model_type": "whisper"}, "has parts beside a decoder"),
        ({"model_type": "gemma3"}, r"has parts beside a decoder \((text|vision)_config"),
        ({"model_type": "qwen3", "quantization_config": {}}, "quantised"),
        ({"model_type": "qwen3", "architectures": ["Qwen3ForSequenceClassification"]}, "writes no text"),
        ({"model_type": "qwen3_asr", "thinker_config": {"classify_num": 5000}}, "lacks its weights"),
    ],
)
def test_models_that_are_not_for_us(tmp_path, config, message):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        load_model(tmp_path, dtype="float32")


def test_forced_aligner_and_other_rope_are_refused(built, tmp_path):
    raw = json.loads((built["original"] / "config.json").read_text())["thinker_config"]
    aligner = damaged(built["original"], tmp_path / "a", thinker_config={**raw, "classify_num": 5000})
    with pytest.raises(ModelError, match="forced aligner"):
        load_model(aligner, dtype="float32")
    raw["text_config"]["rope_scaling"] = {"rope_type": "yarn", "factor": 4.0}
    with pytest.raises(ModelError, match="'yarn'"):
        load_model(damaged(built["original"], tmp_path / "b", thinker_config=raw), dtype="float32")


def test_decoder_under_other_names_is_refused(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    tiny_models.tiny_qwen3(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    GPT2LMHeadModel(GPT2Config(vocab_size=320, n_positions=8, n_embd=8, n_layer=1, n_head=1)).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"parameter transformer\.wte\.weight belongs to no role"):
        load_model(tmp_path, dtype="float32")


def test_incomplete_or_damaged_files(built, tmp_path):
    for layout in ("native", "original"):
        cut = damaged(built[layout], tmp_path / layout)
        file = cut / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1000])
        with pytest.raises(ModelError, match=r"cannot be (read|loaded)"):
            load_model(cut, dtype="float32")
        file.unlink()
        with pytest.raises(ModelError, match=r"model\.safetensors|lacks its weights"):
            load_model(cut, dtype="float32")


def test_files_of_different_models_are_refused(built, tmp_path):
    other_id = damaged(built["native"], tmp_path / "a", audio_token_id=7)
    with pytest.raises(ModelError, match=r"<\|audio_pad\|> is \d+, config\.json says 7"):
        load_tokenizer_and_family(other_id)
    no_token = damaged(built["native"], tmp_path / "b")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (no_token / name).read_text()
        (no_token / name).write_text(text.replace("<|audio_end|>", "<|audio_fin|>"))
    with pytest.raises(ModelError, match=r"lacks <\|audio_end\|>"):
        load_tokenizer_and_family(no_token)
    windows = damaged(built["glmasr"], tmp_path / "c")
    file = windows / "processor_config.json"
    raw = json.loads(file.read_text())
    raw["feature_extractor"] |= {"chunk_length": 30, "n_samples": 480000, "nb_max_frames": 3000}
    file.write_text(json.dumps(raw))
    with pytest.raises(ModelError, match="windows of 3000 frames"):
        load_tokenizer_and_family(windows)


# ---------------------------------------------------------------------------------------------------------------- roles
def test_role_of_every_parameter(each):
    loaded = load_model(each, dtype="float32")
    marks = {"encoder": "audio_tower", "adapter": "multi_modal_projector"}
    for name, _ in loaded.model.named_parameters():
        role = parameter_role(name, loaded.family)
        assert role == next((role for role, mark in marks.items() if mark in name), "language_model"), name
    assert parameter_role("lm_head.weight", loaded.family) == "language_model"
    with pytest.raises(ModelError, match=r"lm_headless\.weight belongs to no role"):
        parameter_role("lm_headless.weight", loaded.family)


@pytest.mark.parametrize("freeze", [(), ("encoder",), ("encoder", "adapter"), ("language_model",)])
def test_what_trains(built, freeze):
    for name in ("native", "qwen2_audio", "voxtral"):
        loaded = load_model(built[name], dtype="float32")
        report = set_trainable(loaded.model, loaded.family, freeze)
        for parameter, value in loaded.model.named_parameters():
            role = parameter_role(parameter, loaded.family)
            wanted = role not in freeze and "embed_positions" not in parameter
            assert value.requires_grad == wanted
            assert parameter in (report.trainable if wanted else report.frozen)[role]
        assert report.num_trainable == sum(p.numel() for p in loaded.model.parameters() if p.requires_grad)


def test_report_is_a_table(built):
    loaded = load_model(built["native"], dtype="float32")
    assert str(set_trainable(loaded.model, loaded.family, ["encoder"])).splitlines() == [
        "role             trainable tensors          values  frozen tensors          values",
        "encoder                          0               0              41          88,256",
        "adapter                          4           8,320               0               0",
        "language_model                  24          94,592               0               0",
    ]


def test_freezing_can_be_taken_back_and_skips_absent_roles(built):
    loaded = load_model(built["tied"], dtype="float32")
    report = set_trainable(loaded.model, loaded.family, ["encoder", "adapter"])
    assert not report.frozen
    with pytest.raises(ConfigError, match="nothing is left to train"):
        set_trainable(loaded.model, loaded.family, ["language_model"])
    with pytest.raises(ConfigError, match="'audio_tower' is no role"):
        set_trainable(loaded.model, loaded.family, ["audio_tower"])
    set_trainable(loaded.model, loaded.family, [])
    assert all(p.requires_grad for p in loaded.model.parameters())


# --------------------------------------------------------------------------------------------------------------- tokens
def test_stop_ids(built, tmp_path):
    expected = {
        "native": ("<|endoftext|>", "<|im_end|>"),
        "original": ("<|endoftext|>", "<|im_end|>"),
        "qwen2_audio": ("<|endoftext|>", "<|im_end|>"),
        "glmasr": ("<|endoftext|>", "<|user|>"),
        "voxtral": ("</s>",),
        "audioflamingo3": ("<|im_end|>", "<|endoftext|>"),
        "tied": ("<|im_end|>", "<|endoftext|>"),
    }
    for name, tokens in expected.items():
        files = load_tokenizer_and_family(built[name])
        found = stop_ids(built[name], files)
        assert files.tokenizer.convert_ids_to_tokens(list(found)) == list(tokens)
        assert end_id(files.family, files.tokenizer) in found


def test_stop_ids_never_come_from_pad(built, tmp_path):
    directory = damaged(built["untied"], tmp_path / "copy", eos_token_id=None, pad_token_id=5)
    (directory / "generation_config.json").write_text(json.dumps({"pad_token_id": 5}))
    files = load_tokenizer_and_family(directory)
    assert stop_ids(directory, files) == (files.tokenizer.eos_token_id,)


# ---------------------------------------------------------------------------------------------------------- tiny models
def test_words_of_the_texts_become_single_tokens(tmp_path):
    texts = ["one two three", "twenty one"]
    directory = tiny_models.tiny_qwen3_asr(tmp_path, texts=texts)
    loaded = load_model(directory, dtype="float32")
    for word in ("one", " two", " three", "twenty", " one"):
        assert len(loaded.family.tokenize(loaded.tokenizer, word)) == 1
    other = "zwölf 十二 one!"
    assert loaded.tokenizer.decode(loaded.family.tokenize(loaded.tokenizer, other)) == other


def test_equal_seeds_give_equal_weights(tmp_path):
    files = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        torch.rand(3)
        files.append(load_file(tiny_models.tiny_qwen3_asr(tmp_path / name, seed=seed) / "model.safetensors"))
    first, same, other = files
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["model.audio_tower.conv_out.weight"], other["model.audio_tower.conv_out.weight"])
