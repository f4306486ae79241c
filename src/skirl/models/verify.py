"""Fresh-process check of an exported model: ``python -m skirl.models.verify DIRECTORY < probe.json``.

Loads the directory as a user of transformers would (Qwen3-ASR's original layout through skirl's loader),
runs the model's own forward pass on one unpacked sequence, and prints the log-probs of its action tokens as JSON.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skirl.algorithms.logprobs import sampling_logits
from skirl.models.family import Family
from skirl.models.loading import load_model, load_tokenizer_and_family
from skirl.prompts.decode import load_clip
from skirl.records import Media

__all__ = ["main"]


@torch.no_grad()
def probe_logprobs(directory: Path, probe: dict[str, Any]) -> list[float]:
    """Log-probs of the probe's action tokens under its sampling distribution, by the model's own forward pass."""
    light = load_tokenizer_and_family(directory)
    if None in light.tokenizer.convert_ids_to_tokens(probe["input_ids"]):
        sys.stderr.write("the tokenizer does not know the probe's tokens: its files are missing or another model's\n")
        raise SystemExit(1)
    model = _plain_model(directory, light.layout, light.family.model_class)
    ids = torch.tensor([probe["input_ids"]])
    inputs: dict[str, Tensor] = {}
    for path, start_s, duration_s, data in probe["media"]:
        media = Media(path, start_s, duration_s, bytes.fromhex(data) if data else None)
        features = light.family.features(light.processor, load_clip(media, light.family.min_samples))
        inputs = _arguments(light.family, {name: _like(value, model.dtype) for name, value in features.items()})
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **inputs).logits[0]
    actions = torch.tensor(probe["action_positions"])
    targets = ids[0][actions]
    distribution = dict(probe["sampling"])
    distribution["banned_ids"] = torch.tensor(distribution["banned_ids"], dtype=torch.long)
    logprobs = sampling_logits(logits[actions - 1], always=targets, **distribution).log_softmax(-1)
    return logprobs.gather(-1, targets[:, None])[:, 0].tolist()


def _plain_model(directory: Path, layout: str, model_class: str) -> Any:
    import transformers

    if layout == "original":
        return load_model(directory, dtype="float32").model
    load: Any = getattr(transformers, model_class).from_pretrained
    model, report = load(directory, output_loading_info=True, dtype="auto")
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
    """Reads the probe from standard input and writes the log-probs to standard output."""
    logprobs = probe_logprobs(Path(sys.argv[1]), json.loads(sys.stdin.read()))
    sys.stdout.write(json.dumps([float(x) for x in np.asarray(logprobs, dtype=np.float64)]) + "\n")


if __name__ == "__main__":
    main()
