"""Fresh-process check of an exported model: ``python -m skirl.models.verify DIRECTORY < probe.json``.

Loads the directory as a user of transformers would (through skirl's loader where transformers has no class: Qwen3-ASR's
original layout, audio models with a scalar head), runs the model's own forward pass on one unpacked sequence, and
prints as JSON the log-probs of its action tokens; of a model with a scalar head their values. Computes in the type of
the weights, or in the probe's "dtype".
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skirl.algorithms.logprobs import sampling_logits
from skirl.models.checkpoints import read_json
from skirl.models.families import TEXT
from skirl.models.family import Family
from skirl.models.loading import ModelFiles, load_model, load_tokenizer_and_family
from skirl.models.scalar_heads import has_scalar_head
from skirl.models.value import load_value_model
from skirl.prompts.decode import load_clip
from skirl.records import Media

__all__ = ["main"]


@torch.no_grad()
def probe_logprobs(directory: Path, probe: dict[str, Any]) -> list[float]:
    """Log-probs of the probe's action tokens under its sampling distribution, by the model's own forward pass."""
    light = load_tokenizer_and_family(directory)
    _check_tokens(light.tokenizer, probe)
    model = _plain_model(directory, light.layout, light.family.model_class, probe)
    ids = torch.tensor([probe["input_ids"]])
    inputs = _audio_inputs(light, probe, model.dtype)
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **inputs).logits[0]
    actions = torch.tensor(probe["action_positions"])
    targets = ids[0][actions]
    distribution = dict(probe["sampling"])
    distribution["banned_ids"] = torch.tensor(distribution["banned_ids"], dtype=torch.long)
    logprobs = sampling_logits(logits[actions - 1], always=targets, **distribution).log_softmax(-1)
    return logprobs.gather(-1, targets[:, None])[:, 0].tolist()


@torch.no_grad()
def probe_values(directory: Path, probe: dict[str, Any]) -> list[float]:
    """Values of the probe's action tokens, read where the probe's "reads" says ("before", the default, or "at"); of a
    ...ForSequenceClassification the one score of the whole sequence.
    """
    light = load_tokenizer_and_family(directory, scalar_heads=True)
    _check_tokens(light.tokenizer, probe)
    ids = torch.tensor([probe["input_ids"]])
    if light.family is TEXT:
        name = read_json(directory / "config.json")["architectures"][0]
        model = _plain_model(directory, light.layout, name, probe)
        output = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0].float()
        if output.shape == (1,):
            return output.tolist()
    else:
        model = load_value_model(directory, kind=None, dtype="float32").model
        inputs = _audio_inputs(light, probe, model.dtype)
        hidden = model.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **inputs)
        output = model.score(hidden.last_hidden_state[0])
    positions = torch.tensor(probe["action_positions"]) - int(probe.get("reads", "before") == "before")
    return output[positions, 0].tolist()


def _check_tokens(tokenizer: Any, probe: dict[str, Any]) -> None:
    if None in tokenizer.convert_ids_to_tokens(probe["input_ids"]):
        sys.stderr.write("the tokenizer does not know the probe's tokens: its files are missing or another model's\n")
        raise SystemExit(1)


def _audio_inputs(light: ModelFiles, probe: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    if not probe["media"]:
        return {}
    if len(probe["media"]) > 1:
        sys.stderr.write(f"the probe has {len(probe['media'])} clips; a prompt of {light.family.name} has one\n")
        raise SystemExit(1)
    path, start_s, duration_s, data = probe["media"][0]
    media = Media(path, start_s, duration_s, bytes.fromhex(data) if data else None)
    features = light.family.features(light.processor, load_clip(media, light.family.min_samples))
    return _arguments(light.family, {name: _like(value, dtype) for name, value in features.items()})


def _plain_model(directory: Path, layout: str, model_class: str, probe: Mapping[str, Any]) -> Any:
    import transformers

    if layout == "original":
        return load_model(directory, dtype="float32").model
    load: Any = getattr(transformers, model_class).from_pretrained
    model, report = load(directory, output_loading_info=True, dtype=probe.get("dtype", "auto"))
    missing = set(report["missing_keys"])
    if missing:
        sys.stderr.write(f"weights are missing: {sorted(missing)}\n")
        raise SystemExit(1)
    return model.eval()


def _arguments(family: Family, features: dict[str, Tensor]) -> dict[str, Tensor]:
    """Features of one clip under the names of the model's own forward pass, with its batch axis."""
    if family.model_type == "qwen3_asr":
        return {name: value[None] for name, value in features.items()}
    if family.model_type == "voxtral":
        return {"input_features": features["input_features"]}
    mask = "feature_attention_mask" if family.model_type == "qwen2_audio" else "input_features_mask"
    return {"input_features": features["input_features"], mask: features["input_features_mask"]}


def _like(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if value.is_floating_point() else value


def main() -> None:
    """Reads the probe from standard input and writes log-probs or values to standard output."""
    directory = Path(sys.argv[1])
    probe = json.loads(sys.stdin.read())
    scalar = has_scalar_head(read_json(directory / "config.json"))
    found = probe_values(directory, probe) if scalar else probe_logprobs(directory, probe)
    sys.stdout.write(json.dumps([float(x) for x in np.asarray(found, dtype=np.float64)]) + "\n")


if __name__ == "__main__":
    main()
