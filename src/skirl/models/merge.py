"""Adapter directories in peft's format: written beside exports, and merged into the model that they belong to."""

import logging
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from skirl.errors import ModelError
from skirl.models import checkpoints
from skirl.models.adapters import MATRIX_A, is_sent_apart
from skirl.models.loading import LoadedModel, export_model, load_model, quiet_transformers
from skirl.models.moe import expert_parts

if TYPE_CHECKING:
    import peft

__all__ = ["merge", "write_adapter"]

log = logging.getLogger(__name__)

PREFIX = "base_model.model."
"""Of peft, before the model's own names."""
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TOLERANCE = 1e-4
"""Largest difference of float32 logits, as a share of the largest logit."""


def write_adapter(loaded: LoadedModel, tensors: Mapping[str, Tensor], directory: Path) -> None:
    """Writes what training changed as peft reads it: ``PeftModel.from_pretrained(base, directory)`` is the policy.

    Args:
        loaded: has adapters. With ``lora.quantize``, the base must be loaded in 4 bits to be the same.
        tensors: a backend's ``adapter_parameters``: adapters, and whatever else trains, in ``modules_to_save``.
        directory: made if missing.
    """
    import peft
    from safetensors.torch import save_file

    lora = loaded.lora
    assert lora is not None, "a model with adapters"
    beside = sorted({_module_of(loaded, name) for name in tensors if not is_sent_apart(name)})
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType]
        use_rslora=lora.rank_stabilized,
        target_modules=_targets(loaded, tensors),
        modules_to_save=beside or None,
        lora_dropout=0.0,
        bias="none",
        inference_mode=True,
        base_model_name_or_path=str(loaded.source),
        task_type="CAUSAL_LM" if loaded.family.placeholder is None and not beside else None,  # pyright: ignore
    )
    directory.mkdir(parents=True, exist_ok=True)
    settings.save_pretrained(str(directory))
    plain = {PREFIX + name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(plain, directory / WEIGHTS, metadata={"format": "pt"})


def _targets(loaded: LoadedModel, tensors: Mapping[str, Tensor]) -> list[str]:
    """Last names where they mean the same layers in the whole model, as engines like it; else whole paths."""
    paths = {name.removesuffix(MATRIX_A) for name in tensors if name.endswith(MATRIX_A)}
    last = {path.rsplit(".", 1)[-1] for path in paths}
    named = {name for name, _ in loaded.model.named_modules() if name.rsplit(".", 1)[-1] in last}
    return sorted(last if named == paths else paths)


def _module_of(loaded: LoadedModel, name: str) -> str:
    """Path of the module that is saved whole for the sake of this parameter: its role's, or its own."""
    roles = [path for role, path in loaded.family.roles.items() if role in ("adapter", "encoder")]
    return next((path for path in roles if name.startswith(path + ".")), name.rsplit(".", 1)[0])


# -------------------------------------------------------------------------------------------------------------- merging
def merge(adapter: Path, base: Path, output: Path) -> None:
    """Adds an adapter into the weights of its base and writes the result as a checkpoint, in the base's type.

    Sums are made in float32 and rounded once. The checkpoint is loaded again before it gets its name: its float32
    logits are those of base and adapter side by side (apart from the rounding, where the base is of a smaller type).

    Args:
        adapter: as peft and ``write_adapter`` write it. base: checkpoint directory. output: must not exist.

    Raises:
        ModelError: something does not fit together, or the result differs; nothing is left at ``output``.
    """
    if output.exists():
        raise ModelError(f"{output} exists already: choose a directory that does not, so that nothing is overwritten")
    _check_adapter(adapter)
    _check_base(base)
    aside = _make_aside(output)
    try:
        _merge(adapter, base, aside)
        aside.rename(output)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    log.info("%s: %s added into %s", output, adapter, base)


def _merge(adapter: Path, base: Path, aside: Path) -> None:
    stored = {name: dtype for name, (_, dtype) in checkpoints.checkpoint_specs(base).items()}
    loaded = load_model(base, dtype="float32")
    wrapped = _with_adapter(loaded.model, adapter)
    apart = _logits(wrapped)
    merged: Any = wrapped.merge_and_unload(safe_merge=True)
    _compare(apart, _logits(merged), f"{adapter} added into {base}")
    state = {n: t.detach().to(getattr(torch, _stored(n, t, stored))) for n, t in _tensors(merged).items()}
    for name, tensor in _tensors(merged).items():
        tensor.data = state[name].float() if tensor.is_floating_point() else tensor.data
    export_model(loaded, state, aside, "same")
    again = load_model(aside, dtype="float32").model
    other = [n for n, t in _tensors(merged).items() if not torch.equal(t, _tensors(again)[n])]
    if other:
        raise ModelError(f"{aside}: {len(other)} tensors were not read back as they were written: {other[0]}")
    _compare(_logits(merged), _logits(again), str(aside))
    log.info("logits are within %.1e of base and adapter apart", float((_logits(again) - apart).abs().max()))


def _check_adapter(adapter: Path) -> None:
    """Raises ModelError where a directory holds no LoRA adapter that can be read; the message says which one might."""
    absent = [name for name in (CONFIG, WEIGHTS) if not (adapter / name).is_file()]
    if absent:
        what = "is no adapter" if adapter.is_dir() else "is no directory"
        raise ModelError(f"{adapter} {what}: there is no {' and no '.join(absent)} in it. {_advice(adapter)}")
    kind = checkpoints.read_json(adapter / CONFIG).get("peft_type")
    if kind != "LORA":
        raise ModelError(
            f"{adapter / CONFIG}: peft_type is {kind!r}, and only LORA can be added into weights here: merge it with "
            "the tool that made it, or give another adapter"
        )


def _advice(adapter: Path) -> str:
    if (adapter / "adapter_model.bin").is_file():
        return f"Pickled weights are not read: write adapter_model.bin again as {WEIGHTS}."
    found = sorted(file for depth in (1, 2, 3) for file in adapter.glob("*/" * depth + CONFIG))
    below = [file.parent for file in found if (file.parent / WEIGHTS).is_file()]
    if below:
        return f"Give the directory that has both, such as {below[-1]}."
    if (adapter / WEIGHTS).is_file() or (adapter / CONFIG).is_file():
        return "Copy the adapter again, with both files."
    return "Give the directory that peft saved, or hf/step-*/adapter of a run with model.lora."


def _check_base(base: Path) -> None:
    if (base / "config.json").is_file():
        return
    if (base / CONFIG).is_file():
        reason = "it holds an adapter, not the model that it belongs to"
    else:
        reason = "there is no config.json in it" if base.is_dir() else "there is no such directory"
    raise ModelError(f"{base} is no checkpoint: {reason}. Give --base the model that the adapter was trained on.")


def _make_aside(output: Path) -> Path:
    """Where the checkpoint is written before it gets its name; made before anything is loaded."""
    aside = output.with_name(f".{output.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
    except OSError as error:
        raise ModelError(f"{output} cannot be made ({error.strerror}): choose another directory") from error
    return aside


def _stored(name: str, tensor: Tensor, stored: Mapping[str, str]) -> str:
    """Type of a tensor on disk, where experts have names of their own."""
    parts = expert_parts(name, tensor.shape)
    return stored[parts[0].name if parts else name]


def _with_adapter(model: nn.Module, adapter: Path) -> "peft.PeftModel":
    """The model with the adapter, every tensor of which has its place."""
    import peft
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(adapter / WEIGHTS, framework="pt") as file:
            held = set(file.keys())
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{adapter / WEIGHTS} cannot be read as safetensors ({error}): it is cut short or damaged; copy it again"
        ) from error
    try:
        with quiet_transformers(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of tensors that are missing: judged below
            made = peft.PeftModel.from_pretrained(model, str(adapter))  # pyright: ignore[reportArgumentType]
    except (KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise ModelError(f"{adapter} does not fit the model: {_shortened(error)}. {_own_base(adapter)}") from error
    known = set(peft.get_peft_model_state_dict(made))
    if held != known:
        lost = sorted(held - known)[:3] or sorted(known - held)[:3]
        what = "holds tensors that the model has no place for" if held - known else "lacks tensors"
        raise ModelError(f"{adapter} {what}: {', '.join(lost)}. {_own_base(adapter)}")
    return made.eval()


def _shortened(error: Exception) -> str:
    """What another library says, of a long list the first entries only."""
    lines = [line.strip() for line in str(error).splitlines()]
    more = f" (and {len(lines) - 3} more)" if len(lines) > 3 else ""
    return " ".join(lines[:3]).rstrip(".") + more


def _own_base(adapter: Path) -> str:
    named = checkpoints.read_json(adapter / CONFIG).get("base_model_name_or_path")
    return f"Give --base the model that it was trained on: {CONFIG} names {named}." if named else "It is damaged."


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, tied ones once, and persistent buffers."""
    saved = model.state_dict().keys()
    return dict(model.named_parameters()) | {name: b for name, b in model.named_buffers() if name in saved}


@torch.no_grad()
def _logits(model: Any) -> Tensor:
    """[1, 16, V] of a fixed row of tokens."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.get_text_config().vocab_size, (1, 16), generator=generator)
    return model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits


def _compare(wanted: Tensor, got: Tensor, what: str) -> None:
    difference = float((wanted - got).abs().max() / wanted.abs().max().clamp(min=1e-6))
    if not difference <= TOLERANCE:
        raise ModelError(f"{what}: logits differ by {difference:.1e} of the largest, more than {TOLERANCE:.0e}")
