"""Model families by ``model_type``. A new audio-in decoder is one more row, and one more builder in testing."""

from collections.abc import Mapping
from types import MappingProxyType

from skirl.models.family import Family, ParsedAnswer, TextFamily
from skirl.models.qwen3_asr import QWEN3_ASR
from skirl.models.windowed import AUDIO_FLAMINGO_3, GLM_ASR, QWEN2_AUDIO, VOXTRAL

__all__ = ["FAMILIES", "TEXT", "Family", "ParsedAnswer"]

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {family.model_type: family for family in (QWEN3_ASR, QWEN2_AUDIO, GLM_ASR, VOXTRAL, AUDIO_FLAMINGO_3)}
)
"""Audio families by the ``model_type`` of their config.json."""

TEXT = TextFamily(
    name="causal language model",
    model_type="text",
    model_class="AutoModelForCausalLM",
    roles={"language_model": "model", "head": "lm_head"},
)
"""Every causal language model of transformers whose decoder is ``model`` and whose head is ``lm_head``."""
