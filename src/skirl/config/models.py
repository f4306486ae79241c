"""The policy's section of a recipe: a checkpoint, what of it is trained, and adapters."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from skirl.config.base import Frozen

__all__ = ["LoRAConfig", "ModelConfig"]


class LoRAConfig(Frozen):
    """Low-rank adapters instead of whole weights: LoRA, arXiv:2106.09685. The reference is the policy without them."""

    rank: Annotated[int, Field(ge=1)] = 16
    """Rank of each adapter."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """The adapter's product is multiplied by alpha / rank (alpha / sqrt(rank) where rank_stabilized is set)."""
    rank_stabilized: bool = False
    """Scale by alpha / sqrt(rank): arXiv:2312.03732."""
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Last names of the linear layers of the language model that get one."""
    quantize: Literal["nf4"] | None = None
    """Hold the frozen weights in 4 bits: QLoRA, arXiv:2305.14314; needs bitsandbytes."""
    commit: Literal["merged", "adapter"] = "merged"
    """How new weights reach engines: added into the weights as they are sent, or as an adapter that the engine adds."""


class ModelConfig(Frozen):
    """The policy: a Hugging Face checkpoint directory."""

    path: Path
    """Checkpoint directory: a causal LM, or an audio LM of a known family. Qwen3-ASR in either layout."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights in training and sampling; log-probs are float32 in any case."""
    freeze: tuple[Literal["encoder", "adapter", "language_model"], ...] = ("encoder",)
    """Roles that are not trained. A role that the model lacks is skipped (a text model has only language_model)."""
    lora: LoRAConfig | None = None
    """Train low-rank adapters of the language model, and nothing else of it; null trains its weights."""
    router_aux_coef: Annotated[float, Field(ge=0)] | None = None
    """Factor of the load-balancing loss of a mixture of experts; null is the checkpoint's own router_aux_loss_coef."""
    export_layout: Literal["same", "native", "original"] = "same"
    """Names of the exported tensors: as loaded, transformers' own, or Qwen3-ASR's release layout (thinker_config)."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward pass: less memory, about a third more compute."""
