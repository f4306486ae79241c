"""Models of real shapes with random weights, for benchmarks: speed does not depend on the weights.

The vocabulary is the release's; the tokenizer is a small one, whose ids are a part of it.
"""

from pathlib import Path
from typing import Any

import torch

from skirl.runtime.device import pick_device
from skirl.testing.tiny_models import tiny_qwen3, tiny_qwen3_asr

__all__ = ["SHAPES", "build"]

_QWEN3 = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128}
SHAPES: dict[str, dict[str, dict[str, int]]] = {
    "speech-0.6B": {
        "audio_config": {"d_model": 896, "encoder_layers": 18, "encoder_attention_heads": 14, "encoder_ffn_dim": 3584,
                         "downsample_hidden_size": 480, "output_dim": 1024},
        "text_config": _QWEN3 | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
                                 "num_attention_heads": 16},
    },
    "speech-1.7B": {
        "audio_config": {"d_model": 1024, "encoder_layers": 24, "encoder_attention_heads": 16, "encoder_ffn_dim": 4096,
                         "downsample_hidden_size": 480, "output_dim": 2048},
        "text_config": _QWEN3 | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
                                 "num_attention_heads": 16},
    },
    "text-0.6B": {
        "": _QWEN3 | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
                      "num_attention_heads": 16, "max_position_embeddings": 40960},
    },
    "text-4B": {
        "": _QWEN3 | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
                      "num_attention_heads": 32, "max_position_embeddings": 40960},
    },
}  # fmt: skip
"""By name: settings by section of config.json, "" being the top. Names that end in "tiny" run anywhere."""


def build(directory: Path, name: str) -> int:
    """Writes ``directory/model``, bfloat16 (float32 for tiny ones); returns its parameters."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoProcessor, AutoTokenizer
    from transformers import Qwen3ASRForConditionalGeneration as Speech

    speech = name.startswith("speech")
    make = (lambda where: tiny_qwen3_asr(where, texts=["one", "two"])) if speech else tiny_qwen3
    if name.endswith("tiny"):
        make(directory / "model")
        return 0
    small = make(directory / "tiny")
    config = AutoConfig.from_pretrained(small)
    for section, values in SHAPES[name].items():
        part: Any = getattr(config, section) if section else config
        for key, value in values.items():
            setattr(part, key, value)
    text: Any = config.text_config if speech else config
    text.layer_types = ["full_attention"] * text.num_hidden_layers
    torch.manual_seed(0)
    with torch.device(pick_device()):
        made: Any = Speech(config) if speech else AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model = made.to(torch.bfloat16)
    model.to("cpu").save_pretrained(directory / "model")
    (AutoProcessor if speech else AutoTokenizer).from_pretrained(small).save_pretrained(directory / "model")
    return sum(p.numel() for p in model.parameters())
