"""Checkpoint directories: tensor names and configs of the layouts, reading and writing weights and what stands beside.

native     transformers' own names and config
original   ``Qwen/Qwen3-ASR-*`` as released: everything under ``thinker_config`` and ``thinker.``; read by qwen-asr,
           by the official fine-tuning script and by vLLM, but not by transformers
text       a causal language model
"""

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from skirl.errors import ModelError
from skirl.models.moe import expert_parts, split_experts
from skirl.models.qwen3_asr import CHAT_TEMPLATE, rows_of_frames
from skirl.speech.languages import LANGUAGES

__all__ = [
    "ASSETS",
    "LICENCES",
    "ORIGINAL_HEAD",
    "ORIGINAL_PREFIXES",
    "Layout",
    "checkpoint_specs",
    "copy_assets",
    "layout_of",
    "native_config",
    "original_config",
    "read_json",
    "read_original_tensors",
    "read_tensors",
    "rename",
    "tensor_names",
    "to_original",
    "weight_files",
    "with_dtype",
    "write_json",
    "write_original_processor",
    "write_weights",
]

Layout = Literal["native", "original", "text"]

ORIGINAL_PREFIXES = (
    ("model.multi_modal_projector.linear_1.", "thinker.audio_tower.proj1."),
    ("model.multi_modal_projector.linear_2.", "thinker.audio_tower.proj2."),
    ("model.audio_tower.", "thinker.audio_tower."),
    ("model.language_model.", "thinker.model."),
    ("lm_head.", "thinker.lm_head."),
)
"""Native -> original prefixes; read backwards, the longer ones come first as they must."""

ORIGINAL_HEAD = "thinker.lm_head.weight"

# Values that the original classes fill in where config.json leaves a key out; no other key means anything to us.
_AUDIO_DEFAULTS: Mapping[str, Any] = {
    "num_mel_bins": 128,
    "encoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "d_model": 1280,
    "dropout": 0,
    "attention_dropout": 0,
    "activation_function": "gelu",
    "activation_dropout": 0,
    "scale_embedding": False,
    "initializer_range": 0.02,
    "n_window": 100,
    "output_dim": 3584,
    "n_window_infer": 400,
    "downsample_hidden_size": 480,
}
_TEXT_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 128000,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "use_cache": True,
    "attention_bias": False,
    "attention_dropout": 0.0,
}
_ROPE_THETA = 5000000.0

# Types as safetensors spells them.
_DTYPES: Mapping[str, str] = {
    "F64": "float64",
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "I64": "int64",
    "I32": "int32",
    "U8": "uint8",
    "BOOL": "bool",
}

# Tensors of old checkpoints that are computed from the config.
_COMPUTED = ("rotary_emb.inv_freq",)

# Files beside the weights that make a checkpoint usable; a tokenizer class may name more.
LICENCES = frozenset({"LICENSE", "LICENSE.txt", "NOTICE"})
ASSETS = LICENCES | frozenset(
    {
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "generation_config.json",
        "merges.txt",
        "params.json",
        "preprocessor_config.json",
        "processor_config.json",
        "special_tokens_map.json",
        "tekken.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab.json",
        "vocab.txt",
    }
)


# -------------------------------------------------------------------------------------------------------------- layouts
def layout_of(config: Mapping[str, Any]) -> Literal["native", "original"]:
    """Which of the two layouts of Qwen3-ASR a config.json is in; both have the same ``model_type``."""
    return "original" if "thinker_config" in config else "native"


def rename(name: str, prefixes: Iterable[tuple[str, str]]) -> str:
    """Replaces the first prefix that matches; other names stay."""
    for old, new in prefixes:
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def to_original(name: str) -> str:
    """Name of a native tensor in the original layout."""
    return rename(name, ORIGINAL_PREFIXES)


def native_config(raw: Mapping[str, Any], *, has_head: bool, eos_token_id: Any, where: Path) -> dict[str, Any]:
    """Converts an original config.json to arguments of transformers' Qwen3ASRConfig.

    Args:
        raw: the whole original config.
        has_head: the checkpoint holds a head of its own; decides where the config does not say if it is tied.
        eos_token_id: of generation_config.json, None where there is none.
        where: for messages.

    Raises:
        ModelError: the config asks for something that the native classes cannot do.
    """
    thinker = raw["thinker_config"]
    if thinker.get("classify_num") is not None:
        raise ModelError(f"{where}: this is a Qwen3 forced aligner (classify_num), which writes no text; use Qwen3-ASR")
    audio = _filled(thinker.get("audio_config"), _AUDIO_DEFAULTS)
    audio["max_position_embeddings"] = rows_of_frames(2 * audio["n_window"], 2 * audio["n_window"])
    told = thinker.get("text_config") or {}
    text = _filled(told, _TEXT_DEFAULTS)
    tied = bool(told.get("tie_word_embeddings", not has_head))
    text |= {"rope_parameters": _native_rope(told, where), "tie_word_embeddings": tied}
    config: dict[str, Any] = {"audio_config": audio, "text_config": text, "tie_word_embeddings": tied}
    config |= {key: thinker[key] for key in ("audio_token_id", "initializer_range") if key in thinker}
    config |= {key: raw[key] for key in ("timestamp_token_id", "dtype") if key in raw}
    if "torch_dtype" in raw:
        config["dtype"] = raw["torch_dtype"]
    if eos_token_id is not None:
        config["eos_token_id"] = eos_token_id
    return config


def _filled(told: Mapping[str, Any] | None, defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {key: (told or {}).get(key, value) for key, value in defaults.items()}


def _native_rope(text: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """Sections of M-RoPE are dropped: with audio only, its three axes are equal, so plain RoPE is exact."""
    scaling = dict(text.get("rope_scaling") or {})
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "mrope"):
        raise ModelError(f"{where}: rope_scaling of type {kind!r} is not supported in the original Qwen3-ASR layout")
    return {"rope_type": "default", "rope_theta": text.get("rope_theta", _ROPE_THETA)}


def original_config(native: Mapping[str, Any], token_ids: Mapping[str, int]) -> dict[str, Any]:
    """Converts a native config to the original layout; the inverse of ``native_config``.

    Args:
        native: Qwen3ASRConfig as a dict.
        token_ids: ids of audio_start, audio_end and of the word "user".
    """
    audio, text = native["audio_config"], native["text_config"]
    half = text["head_dim"] // 2
    side = half * 5 // 16  # 20 of 64, as released: [24, 20, 20]
    tied = bool(native["tie_word_embeddings"])
    return {
        "architectures": ["Qwen3ASRForConditionalGeneration"],
        "model_type": "qwen3_asr",
        "support_languages": list(LANGUAGES),
        "thinker_config": {
            "model_type": "qwen3_asr_thinker",
            "audio_config": {key: audio[key] for key in _AUDIO_DEFAULTS} | {"model_type": "qwen3_asr_audio_encoder"},
            "text_config": {key: text[key] for key in _TEXT_DEFAULTS}
            | {
                "rope_theta": text["rope_parameters"]["rope_theta"],
                "rope_scaling": {
                    "rope_type": "default",
                    "type": "default",
                    "mrope_section": [half - 2 * side, side, side],
                    "mrope_interleaved": True,
                    "interleaved": True,
                },
                "tie_word_embeddings": tied,
            },
            "audio_token_id": native["audio_token_id"],
            "audio_start_token_id": token_ids["audio_start"],
            "audio_end_token_id": token_ids["audio_end"],
            "user_token_id": token_ids["user"],
            "initializer_range": native["initializer_range"],
        },
        "timestamp_token_id": native["timestamp_token_id"],
    }


# ---------------------------------------------------------------------------------------------------------------- files
def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ModelError: the file is not one."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON ({error}); the checkpoint is incomplete or damaged") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path} holds no JSON object; the checkpoint is damaged")
    return found


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Indented, keys sorted."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint, by its index where it has one."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        return [directory / name for name in sorted(set(read_json(index)["weight_map"].values()))]
    return sorted(directory.glob("model*.safetensors"))


def tensor_names(directory: Path) -> set[str]:
    """Names on disk; reads headers only."""
    names: set[str] = set()
    for file in _present(directory):
        with _open(file) as tensors:
            names.update(tensors.keys())
    return names


def checkpoint_specs(directory: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shapes and types on disk ("float32", "bfloat16", ...) by the names that ``load_model`` gives the tensors.

    Reads headers only: what an engine must hold, independent of any loaded model. Experts are named one by one (see
    moe.py). A head that the config ties to the
    embeddings is left out, whether it is stored or not; so is what is computed from the config.
    """
    from transformers import AutoConfig

    from skirl.models.families import FAMILIES, TEXT

    raw = read_json(directory / "config.json")
    family = FAMILIES.get(str(raw.get("model_type")), TEXT)
    original = layout_of(raw) == "original"
    pairs = [*ORIGINAL_PREFIXES] if original else [*family.disk_prefixes]
    backwards = sorted(((disk, ours) for ours, disk in pairs), key=lambda pair: -len(pair[0]))
    specs: dict[str, tuple[tuple[int, ...], str]] = {}
    for file in _present(directory):
        with _open(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118
                view = tensors.get_slice(name)
                ours, shape, dtype = rename(name, backwards), tuple(view.get_shape()), _DTYPES[view.get_dtype()]
                parts = expert_parts(ours, shape)
                specs |= {part.name: ((part.stop - part.start, shape[2]), dtype) for part in parts}
                specs |= {} if parts else {ours: (shape, dtype)}
    head = family.roles["head"] + ".weight"
    if original:
        told = raw["thinker_config"].get("text_config") or {}
        tied = bool(told.get("tie_word_embeddings", head not in specs))
    else:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        tied = hasattr(config, "tie_word_embeddings") and bool(config.tie_word_embeddings)
    left_out = {head} if tied else set()
    return {name: spec for name, spec in specs.items() if name not in left_out and not name.endswith(_COMPUTED)}


def read_original_tensors(directory: Path) -> dict[str, Tensor]:
    """All tensors of an original checkpoint under native names; views of the files until they are copied."""
    backwards = sorted(((new, old) for old, new in ORIGINAL_PREFIXES), key=lambda pair: -len(pair[0]))
    tensors: dict[str, Tensor] = {}
    for file in _present(directory):
        with _open(file) as found:
            tensors.update({rename(name, backwards): found.get_tensor(name) for name in found.keys()})  # noqa: SIM118
    return tensors


def read_tensors(directory: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Those of the named tensors that the files hold, under the names that they have there."""
    wanted = set(names)
    tensors: dict[str, Tensor] = {}
    for file in _present(directory):
        with _open(file) as found:
            tensors |= {name: found.get_tensor(name) for name in found.keys() if name in wanted}  # noqa: SIM118
    return tensors


def _present(directory: Path) -> list[Path]:
    files = weight_files(directory)
    absent = [file.name for file in files if not file.exists()]
    if absent or not files:
        raise ModelError(
            f"{directory} lacks its weights ({', '.join(absent) or 'no model*.safetensors'}): the download is "
            "incomplete, or the checkpoint is in another format; save it as safetensors"
        )
    return files


def _open(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file} cannot be read ({error}); the file is damaged or cut off, copy it again") from error


def write_weights(directory: Path, tensors: Mapping[str, Tensor], max_shard_bytes: int = 5 * 10**9) -> None:
    """Writes safetensors, in shards with an index where there is too much for one file; experts one by one."""
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    # Contiguous copies only where needed; storage shared by two names is cut apart, which safetensors asks for.
    plain = {name: tensor.detach().contiguous() for name, tensor in split_experts(tensors).items()}
    seen: set[int] = set()
    for name, tensor in plain.items():
        if tensor.numel() and tensor.untyped_storage().data_ptr() in seen:
            plain[name] = tensor.clone()
        seen.add(tensor.untyped_storage().data_ptr())
    split = split_torch_state_dict_into_shards(
        plain, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_bytes
    )
    for name, parts in split.filename_to_tensors.items():
        file = directory / name
        file.touch()
        mode = file.stat().st_mode  # what the user's umask asks for: safetensors would leave it to its owner alone
        save_file({part: plain[part] for part in parts}, file, metadata={"format": "pt"})
        file.chmod(mode)
    if split.is_sharded:
        write_json(
            directory / "model.safetensors.index.json",
            {"metadata": split.metadata, "weight_map": split.tensor_to_filename},
        )


def copy_assets(source: Path, directory: Path, names: Iterable[str]) -> None:
    """Copies those of the files that exist, as they are."""
    for name in sorted(names):
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)


def write_original_processor(extractor: Any, directory: Path) -> None:
    """preprocessor_config.json and chat_template.json under the names that qwen-asr and vLLM read."""
    keys = ("chunk_length", "dither", "feature_size", "hop_length", "n_fft", "n_samples", "nb_max_frames")
    keys += ("padding_side", "padding_value", "return_attention_mask", "sampling_rate")
    found = extractor.to_dict()
    write_json(
        directory / "preprocessor_config.json",
        {key: found[key] for key in keys if key in found}
        | {"feature_extractor_type": "WhisperFeatureExtractor", "processor_class": "Qwen3ASRProcessor"},
    )
    write_json(directory / "chat_template.json", {"chat_template": CHAT_TEMPLATE})


def with_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The same config for weights of another type, wherever it names one."""
    result: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            result[key] = with_dtype(value, dtype)
        else:
            result[key] = dtype if key in ("dtype", "torch_dtype") and isinstance(value, str) else value
    return result
