"""Checkpoint directory -> model, whole or not at all; which parameters train; model -> checkpoint directory."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from skirl.config.models import LoRAConfig
from skirl.errors import ModelError
from skirl.models import checkpoints
from skirl.models.checkpoints import Layout
from skirl.models.families import FAMILIES, TEXT
from skirl.models.family import Family
from skirl.models.moe import check_experts
from skirl.models.quantize import is_quantized
from skirl.models.qwen3_asr import CHAT_TEMPLATE
from skirl.models.roles import (
    Role,
    TrainableReport,
    adapter_target,
    base_name,
    is_adapter_name,
    parameter_role,
    set_trainable,
)
from skirl.models.scalar_heads import ScalarHead, has_scalar_head, pad_id, with_head

__all__ = [
    "LoadedModel",
    "ModelFiles",
    "Role",
    "TrainableReport",
    "check_loaded",
    "end_id",
    "export_model",
    "load_model",
    "load_tokenizer_and_family",
    "parameter_role",
    "prepared",
    "quiet_transformers",
    "read_weights",
    "set_trainable",
    "stop_ids",
]

# Tensors that old checkpoints hold and that are recomputed from the config.
_HARMLESS_ENDINGS = ("rotary_emb.inv_freq",)


class ModelFiles(NamedTuple):
    """What a checkpoint directory says without its weights."""

    config: Any
    """transformers config in native form, whatever the layout on disk."""
    family: Family
    tokenizer: Any
    processor: Any
    """None for text models."""
    layout: Layout


@dataclass
class LoadedModel:
    """A model and what belongs to it.

    Attributes:
        model: transformers model on the CPU, in eval mode, tensor names native.
        processor: None for text models.
        layout: of the directory it came from.
        config: the model's own.
        source: the directory.
        shapes: of every tensor when it was loaded; a backend may leave shards in the model.
        scalar_head: of a value or reward model; None for a model that writes text.
        lora: its adapters (``adapters.add_adapters``); None where it has none.
    """

    model: Any
    family: Family
    tokenizer: Any
    processor: Any
    layout: Layout
    config: Any
    source: Path
    shapes: Mapping[str, tuple[int, ...]] = field(repr=False)
    lora: LoRAConfig | None = None
    scalar_head: ScalarHead | None = None


# -------------------------------------------------------------------------------------------------------------- loading
def load_tokenizer_and_family(path: Path | str, *, scalar_heads: bool = False) -> ModelFiles:
    """Reads everything but the weights.

    Args: scalar_heads: take models whose head writes no text, too.

    Raises:
        ModelError: no such directory, not a checkpoint, an unknown kind of model, files that do not fit together.
    """
    directory = _local(path)
    raw = checkpoints.read_json(directory / "config.json")
    _refuse_unusable(raw, directory, scalar_heads)
    model_type = raw.get("model_type")
    family = FAMILIES.get(str(model_type))
    if family is None:
        config = _text_config(raw, directory)
        return ModelFiles(config, TEXT, _tokenizer(directory), None, "text")
    layout = checkpoints.layout_of(raw)
    if layout == "original" and model_type == "qwen3_asr":
        config = _original_config(raw, directory)
        processor = _original_processor(config, directory)
    else:
        config = _auto("AutoConfig", directory)
        processor = _auto("AutoProcessor", directory)
    _check_tokens(family, config, processor.tokenizer, directory)
    family.check_processor(config, processor)
    return ModelFiles(config, family, processor.tokenizer, processor, layout)


def load_model(
    path: Path | str,
    *,
    dtype: Literal["float32", "bfloat16"],
    attn_implementation: str | dict[str, str] | None = None,
    gradient_checkpointing: bool = False,
) -> LoadedModel:
    """Loads a checkpoint; a tensor that is missing, unexpected or of another shape is always an error.

    Args:
        dtype: type of the parameters; position tables that their authors keep in float32 stay so.
        attn_implementation: one name for all parts, or {"text_config": ..., "audio_config": ...}.
        gradient_checkpointing: recompute layers in the backward pass; acts in train mode only, as transformers has it.

    Raises:
        ModelError: see above and ``load_tokenizer_and_family``; the message names the tensors.
    """
    directory = _local(path)
    files = load_tokenizer_and_family(directory)
    model, info = read_weights(directory, files, files.family.model_class, dtype, attn_implementation)
    check_loaded(model, info, files.family, directory)
    return prepared(model, files, directory, gradient_checkpointing)


def read_weights(
    directory: Path,
    files: ModelFiles,
    model_class: str,
    dtype: Literal["float32", "bfloat16"],
    attn_implementation: str | dict[str, str] | None,
) -> tuple[Any, Mapping[str, Any]]:
    """(model, what did not fit); the caller judges what may be missing. Raises ModelError: a file cannot be read."""
    import transformers
    from safetensors import SafetensorError

    options: dict[str, Any] = {
        "config": files.config,
        "dtype": getattr(torch, dtype),
        "attn_implementation": attn_implementation,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # reported with all names, see check_loaded
    }
    load = getattr(transformers, model_class).from_pretrained
    with quiet_transformers():
        try:
            if files.layout == "original":
                model, info = load(None, state_dict=checkpoints.read_original_tensors(directory), **options)
                _set_generation_config(model, directory)
            else:
                model, info = load(directory, local_files_only=True, **options)
        except (OSError, RuntimeError, SafetensorError, ValueError) as error:
            raise ModelError(f"{directory}: the weights cannot be loaded: {error}") from error
    return model, info


def prepared(model: Any, files: ModelFiles, directory: Path, gradient_checkpointing: bool) -> LoadedModel:
    """A model whose weights were checked, in eval mode, in memory of its own."""
    check_experts(model, files.config.model_type, directory)
    _own_memory(model)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.eval()
    return LoadedModel(
        model=model,
        family=files.family,
        tokenizer=files.tokenizer,
        processor=files.processor,
        layout=files.layout,
        config=model.config,
        source=directory,
        shapes={name: tuple(tensor.shape) for name, tensor in model.state_dict().items()},
    )


def _local(path: Path | str) -> Path:
    directory = Path(path)
    if not directory.is_dir():
        raise ModelError(
            f"model.path: {directory} is no directory on this machine. skirl reads local checkpoints only; for a hub "
            f"name, run `hf download {path} --local-dir DIR` and set model.path to DIR"
        )
    if (directory / "config.json").is_file():
        return directory
    if (directory / "adapter_config.json").is_file():
        raise ModelError(f"{directory} holds a LoRA adapter without its model: merge it into the model first")
    raise ModelError(f"{directory} has no config.json: it is not a Hugging Face checkpoint directory")


def _refuse_unusable(raw: Mapping[str, Any], directory: Path, scalar_heads: bool) -> None:
    if "quantization_config" in raw:
        raise ModelError(f"{directory}: quantised weights cannot be trained; use the bfloat16 or float32 checkpoint")
    if has_scalar_head(raw) and not scalar_heads:
        name = raw["architectures"][0]
        raise ModelError(f"{directory}: {name} writes no text; a policy needs a model that generates")


def _text_config(raw: Mapping[str, Any], directory: Path) -> Any:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type = raw.get("model_type")
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ModelError(
            f"{directory}: model_type {model_type!r} is not supported. Audio models: {', '.join(FAMILIES)}; "
            "text models: any causal language model of the installed transformers"
        )
    config = _auto("AutoConfig", directory)
    if config.sub_configs or config.is_encoder_decoder:
        parts = ", ".join(config.sub_configs) or "an encoder"
        raise ModelError(
            f"{directory}: model_type {model_type!r} has parts beside a decoder ({parts}) and is none of the audio "
            f"families {', '.join(FAMILIES)}"
        )
    return config


def _auto(kind: Literal["AutoConfig", "AutoProcessor", "AutoTokenizer"], directory: Path) -> Any:
    import transformers

    what = {"AutoConfig": "config", "AutoProcessor": "processor", "AutoTokenizer": "tokenizer"}[kind]
    with quiet_transformers():
        try:
            return getattr(transformers, kind).from_pretrained(directory, local_files_only=True)
        except (AttributeError, ImportError, KeyError, OSError, TypeError, ValueError) as error:
            raise ModelError(f"{directory}: the {what} cannot be loaded: {error}") from error


def _tokenizer(directory: Path) -> Any:
    tokenizer = _auto("AutoTokenizer", directory)
    if not len(tokenizer):  # transformers makes an empty one where the files are missing
        raise ModelError(
            f"{directory} holds no tokenizer: copy tokenizer.json and tokenizer_config.json beside the weights"
        )
    return tokenizer


def _original_config(raw: Mapping[str, Any], directory: Path) -> Any:
    from transformers import Qwen3ASRConfig

    generation = directory / "generation_config.json"
    eos = checkpoints.read_json(generation).get("eos_token_id") if generation.is_file() else None
    has_head = checkpoints.ORIGINAL_HEAD in checkpoints.tensor_names(directory)
    return Qwen3ASRConfig(**checkpoints.native_config(raw, has_head=has_head, eos_token_id=eos, where=directory))


def _original_processor(config: Any, directory: Path) -> Any:
    """Original directories name Whisper's feature extractor, which pads otherwise, and an older chat template."""
    import transformers

    tokenizer = _tokenizer(directory)
    if not hasattr(tokenizer, "audio_token"):
        names = {
            "audio_token": "<|audio_pad|>",
            "audio_bos_token": "<|audio_start|>",
            "audio_eos_token": "<|audio_end|>",
        }
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory, extra_special_tokens=names)
    audio = config.audio_config
    extractor = transformers.Qwen3ASRFeatureExtractor(feature_size=audio.num_mel_bins, n_window=audio.n_window)
    return transformers.Qwen3ASRProcessor(extractor, tokenizer, chat_template=CHAT_TEMPLATE)


def _set_generation_config(model: Any, directory: Path) -> None:
    from transformers import GenerationConfig

    if (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory)


def _check_tokens(family: Family, config: Any, tokenizer: Any, directory: Path) -> None:
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in (*family.banned, *family.control)}
    known = tokenizer.get_vocab()
    absent = [token for token in ids if token not in known]
    if absent:
        raise ModelError(f"{directory}: the tokenizer lacks {', '.join(absent)}, which {family.name} needs")
    if ids[str(family.placeholder)] != config.audio_token_id:
        raise ModelError(
            f"{directory}: the tokenizer's {family.placeholder} is {ids[str(family.placeholder)]}, config.json says "
            f"{config.audio_token_id}: the tokenizer does not belong to this checkpoint"
        )


def check_loaded(model: Any, info: Mapping[str, Any], family: Family, directory: Path) -> None:
    """Raises ModelError, with the names, unless every tensor of the checkpoint and of the model found the other."""
    shapes = {name: (found, wanted) for name, found, wanted in info["mismatched_keys"]}
    problems = [f"{name} is missing" for name in sorted(info["missing_keys"])]
    problems += [
        f"{name} has shape {tuple(found)}, the config asks for {tuple(wanted)}"
        for name, (found, wanted) in sorted(shapes.items())
    ]
    problems += [
        f"{name} is not part of the model"
        for name in sorted(info["unexpected_keys"])
        if not name.endswith(_HARMLESS_ENDINGS)
    ]
    problems += list(info["error_msgs"])
    if problems:
        more = f"; and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise ModelError(
            f"{directory}: {len(problems)} tensors do not fit {type(model).__name__}: {'; '.join(problems[:10])}{more}."
            " The checkpoint is incomplete, or its config.json belongs to another model"
        )
    for name, _ in model.named_parameters():
        parameter_role(name, family)
    untied = _tied_by_config(model) - set(_tied_in(model))
    if untied:
        raise ModelError(
            f"{directory}: config.json ties {', '.join(sorted(untied))} to the embeddings, but the checkpoint holds "
            "other values for it: set tie_word_embeddings to what the weights are"
        )


def _tied_by_config(model: Any) -> set[str]:
    """Names that the config asks to tie; some families have no such setting."""
    ties = hasattr(model.config, "tie_word_embeddings") and model.config.tie_word_embeddings
    return {name for name in model.state_dict() if ties and name in (type(model)._tied_weights_keys or ())}


def _tied_in(model: Any) -> dict[str, str]:
    """Tensors that are another name of an earlier one -> that one."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in every if first[id(parameter)] != name}


def _own_memory(model: nn.Module) -> None:
    """Copies the weights out of the mapped checkpoint files, which may be overwritten or removed while we train."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars and reports of transformers meanwhile: what matters is raised."""
    from transformers.utils import logging as hf_logging

    level, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()


# --------------------------------------------------------------------------------------------------------------- tokens
def end_id(family: Family, tokenizer: Any) -> int:
    """Id of the token that ends an answer, for supervised targets.

    Raises:
        ModelError: the tokenizer has no eos token.
    """
    found = tokenizer.eos_token_id if family.end is None else tokenizer.convert_tokens_to_ids(family.end)
    if found is None:
        raise ModelError("the tokenizer has no eos_token, so answers would never end: set it in tokenizer_config.json")
    return int(found)


def stop_ids(directory: Path, files: ModelFiles) -> tuple[int, ...]:
    """Ids that end a response: eos of generation_config.json, else of config.json; and the family's end token.

    The pad token is never asked: in Qwen3-ASR it is one of the end tokens. Needs no weights, so the driver can ask.
    """
    path = directory / "generation_config.json"
    generation = checkpoints.read_json(path).get("eos_token_id") if path.is_file() else None
    configs = (files.config, files.config.get_text_config())
    told = (generation, *(config.to_dict().get("eos_token_id") for config in configs))
    first = next((found for found in told if found is not None), ())
    ids = [first] if isinstance(first, int) else list(first)
    return tuple(dict.fromkeys([*map(int, ids), end_id(files.family, files.tokenizer)]))


# --------------------------------------------------------------------------------------------------------------- export
def export_model(
    loaded: LoadedModel,
    state_dict: Mapping[str, Tensor],
    directory: Path,
    layout: Literal["same", "native", "original"],
) -> None:
    """Writes a checkpoint that others load: weights, config, tokenizer, processor, chat template, generation config.

    Args:
        state_dict: whole tensors on the CPU under native names. Tied ones may be missing; so may frozen ones, which
            are then taken from ``loaded``.
        directory: made if missing; must not be the directory that the model came from.
        layout: "native" is read by transformers, "original" (Qwen3-ASR only) by qwen-asr and vLLM; "same" as loaded.

    Raises:
        ModelError: a trained tensor is missing, a name is unknown, or the family has no such layout.
    """
    if loaded.scalar_head is not None:
        layout = "native"  # the release layout of an audio model has no place for a scalar head
    target: Layout = loaded.layout if layout == "same" or (loaded.layout, layout) == ("text", "native") else layout
    if target == "original" and loaded.family.model_type != "qwen3_asr":
        raise ModelError(
            f"model.export_layout: original is Qwen3-ASR's release layout; {loaded.family.name} has only native"
        )
    if directory.resolve() == loaded.source.resolve():
        raise ModelError(f"{directory} is the directory that the model was loaded from; export to another one")
    tensors = _complete(loaded, state_dict)
    directory.mkdir(parents=True, exist_ok=True)
    dtype = str(max(tensors.values(), key=Tensor.numel).dtype).removeprefix("torch.")
    if target == "original":
        head, embeddings = loaded.family.roles["head"] + ".weight", "model.language_model.embed_tokens.weight"
        whole = {**tensors, head: tensors.get(head, tensors[embeddings])}  # the release holds the tied head as well
        checkpoints.write_weights(directory, {checkpoints.to_original(name): t for name, t in whole.items()})
    else:
        prefixes = loaded.family.disk_prefixes
        checkpoints.write_weights(directory, {checkpoints.rename(name, prefixes): t for name, t in tensors.items()})
    _write_companions(loaded, directory, target, dtype)


def _complete(loaded: LoadedModel, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every tensor of a checkpoint once, in the model's order."""
    model, tied = loaded.model, set(_tied_in(loaded.model))
    state = {base_name(name): tensor for name, tensor in model.state_dict().items()}
    held = {name: tensor for name, tensor in state.items() if name in loaded.shapes}  # no adapters, no scales of 4 bits
    unknown = sorted(set(state_dict) - set(held))
    if unknown:
        raise ModelError(f"export: {unknown[0]} is no tensor of {type(model).__name__} ({len(unknown)} unknown names)")
    named = list(model.named_parameters())
    fixed = {base_name(name) for name, p in named if not p.requires_grad and not is_quantized(p)}
    fixed -= {adapter_target(name) for name, _ in named if is_adapter_name(name)}
    fixed |= {name for name, _ in model.named_buffers()}
    missing = sorted(set(held) - tied - fixed - set(state_dict))
    if missing:
        raise ModelError(f"export: the trained tensor {missing[0]} is missing in the weights that were gathered")
    tensors = {name: state_dict.get(name, held[name]) for name in held if name not in tied}
    _check_whole(loaded, tensors, state_dict)
    return tensors


def _check_whole(loaded: LoadedModel, tensors: Mapping[str, Tensor], state_dict: Mapping[str, Tensor]) -> None:
    """Shards and flattened groups must not pass for tensors; a tied name must not hold something else."""
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != loaded.shapes[name]:
            raise ModelError(
                f"export: {name} has shape {tuple(tensor.shape)} instead of {loaded.shapes[name]}: it was not gathered"
            )
    for name, source in _tied_in(loaded.model).items():
        if name in state_dict and not torch.equal(state_dict[name], tensors[source]):
            raise ModelError(f"export: {name} is tied to {source}, but its values differ")


def _write_companions(loaded: LoadedModel, directory: Path, target: Layout, dtype: str) -> None:
    """Everything beside the weights: copied as it is where the layout stays, converted where it does not."""
    files = checkpoints.ASSETS | set(type(loaded.tokenizer).vocab_files_names.values())
    if target == loaded.layout:
        config = checkpoints.read_json(loaded.source / "config.json")
    elif target == "original":
        ids = {
            "audio_start": loaded.tokenizer.convert_tokens_to_ids("<|audio_start|>"),
            "audio_end": loaded.tokenizer.convert_tokens_to_ids("<|audio_end|>"),
            "user": loaded.family.tokenize(loaded.tokenizer, "user")[0],
        }
        config = checkpoints.original_config(loaded.config.to_dict(), ids) | {"dtype": dtype}
        checkpoints.write_original_processor(loaded.processor.feature_extractor, directory)
        files -= {"processor_config.json", "preprocessor_config.json", "chat_template.jinja", "chat_template.json"}
    else:
        config = json.loads(loaded.config.to_json_string()) | {"architectures": [type(loaded.model).__name__]}
        loaded.processor.save_pretrained(directory)
        files = {"generation_config.json", *checkpoints.LICENCES}
    if loaded.scalar_head is not None:
        config = with_head(config, loaded.scalar_head, type(loaded.model).__name__, pad_id(loaded.tokenizer))
    checkpoints.write_json(directory / "config.json", checkpoints.with_dtype(config, dtype))
    checkpoints.copy_assets(loaded.source, directory, files)
