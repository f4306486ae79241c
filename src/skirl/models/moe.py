"""Mixtures of experts: the load-balancing loss of each sequence, and the names that checkpoints have for experts.

In memory transformers holds all experts of a layer in two tensors; checkpoints, engines and commits name each alone:
    mlp.experts.gate_up_proj [E, 2 I, D]  ->  mlp.experts.{e}.gate_proj.weight [I, D], mlp.experts.{e}.up_proj.weight
    mlp.experts.down_proj [E, D, I]       ->  mlp.experts.{e}.down_proj.weight [D, I]
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from skirl.errors import ModelError

__all__ = [
    "ExpertPart",
    "Routers",
    "balance_losses",
    "check_experts",
    "expert_parts",
    "split_experts",
    "zero3_leaf_modules",
]

GATE_UP, DOWN = ".mlp.experts.gate_up_proj", ".mlp.experts.down_proj"


# ---------------------------------------------------------------------------------------------------------------- names
class ExpertPart(NamedTuple):
    """A matrix of one expert: ``fused[expert, start:stop]``."""

    name: str
    expert: int
    start: int
    stop: int

    def of(self, fused: Tensor) -> Tensor:
        """Its values, in the memory of all experts."""
        return fused[self.expert, self.start : self.stop]


def expert_parts(name: str, shape: Sequence[int]) -> list[ExpertPart]:
    """The matrices that a tensor of this name holds, in the order of checkpoints; nothing for other tensors.

    Args: shape: of the whole tensor.
    """
    if len(shape) != 3 or not name.endswith((GATE_UP, DOWN)):
        return []
    stem, rows = name.rsplit(".", 1)[0], shape[1]
    if name.endswith(DOWN):
        return [ExpertPart(f"{stem}.{e}.down_proj.weight", e, 0, rows) for e in range(shape[0])]
    spans = (("gate_proj", 0, rows // 2), ("up_proj", rows // 2, rows))
    return [ExpertPart(f"{stem}.{e}.{kind}.weight", e, a, b) for e in range(shape[0]) for kind, a, b in spans]


def split_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under the names of checkpoints; those of experts are views."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        parts = expert_parts(name, tensor.shape)
        found |= {part.name: part.of(tensor) for part in parts} if parts else {name: tensor}
    return found


def check_experts(model: nn.Module, model_type: str, where: Path) -> None:
    """Experts are stored as this module says, or there are none.

    Raises: ModelError: their names in checkpoints are others, so that exports and commits would be wrong.
    """
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    fused = {name for name, p in model.named_parameters() if p.ndim == 3 and ".experts." in name}
    if not fused:
        return
    steps: list[Any] = get_checkpoint_conversion_mapping(model_type) or []
    known = {tuple(step.target_patterns): tuple(step.source_patterns) for step in steps}
    wanted = {
        ("mlp.experts.gate_up_proj",): ("mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"),
        ("mlp.experts.down_proj",): ("mlp.experts.*.down_proj.weight",),
    }
    odd = sorted(name for name in fused if not name.endswith((GATE_UP, DOWN)))
    if known != wanted or odd:
        raise ModelError(
            f"{where}: the experts of model_type {model_type!r} are stored in a form that skirl cannot export or send "
            f"to engines ({(odd or sorted(fused))[0]}); mixtures of experts that are known: qwen3_moe, qwen2_moe and "
            "others whose checkpoints hold mlp.experts.N.gate_proj, up_proj and down_proj"
        )


def zero3_leaf_modules(model: nn.Module) -> list[type[nn.Module]]:
    """Classes of the blocks that route tokens. ZeRO-3 must gather each as one: ranks may visit other experts inside,
    and a gather that only some ranks ask for never ends.
    """
    return list(dict.fromkeys(type(block) for block in _blocks(model)))


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        children = {name for name, _ in module.named_children()}
        if "experts" in children and children & {"gate", "router"}:
            yield module


# ----------------------------------------------------------------------------------------------------- balance of loads
def balance_losses(logits: Tensor, chosen: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Load-balancing loss of each sequence of a packed row, in one layer: [S] float32, 1 where loads are even.

    L_i = E sum_e f_ie P_ie;  f_ie: share of expert e in the sequence's choices (no gradient),  P_ie: mean over its
    tokens of the router's probability of e (gradient)

    Each sequence counts for itself, so that the gradient is the same for every split of a batch into rows and ranks.

    Args:
        logits: [N, E] of the router. chosen: [N, K] experts of each token. cu_seqlens: [S+1] borders of the sequences.

    Source: DeepSeek-V3, arXiv:2412.19437, eq. 17 to 20 (there with sigmoid scores, normalised; here softmax). Differs
        from transformers' loss: that is over all tokens of a batch and layers at once, and K times as large, as its f
        counts choices a token.
    """
    num_tokens, num_experts = logits.shape
    lengths = cu_seqlens.diff().long()
    num_sequences = len(lengths)
    owner = torch.repeat_interleave(torch.arange(num_sequences, device=logits.device), lengths, output_size=num_tokens)
    probabilities = logits.float().softmax(-1)
    sums = probabilities.new_zeros(num_sequences, num_experts).index_add(0, owner, probabilities)
    slots = (owner[:, None] * num_experts + chosen).flatten()
    counts = torch.bincount(slots, minlength=num_sequences * num_experts).view(num_sequences, num_experts)
    shares = counts / (chosen.shape[1] * lengths[:, None])
    return num_experts * (shares * (sums / lengths[:, None])).sum(-1)


class Routers:
    """The routers of a language model, and what they chose in a forward pass.

    Args:
        language_model: none of its modules need be a router.
        source: for messages.
    """

    def __init__(self, language_model: nn.Module, source: Path) -> None:
        self._source = source
        self._known = hasattr(sys.modules[type(language_model).__module__], "load_balancing_loss_func")
        self._seen: list[tuple[Tensor, Tensor]] | None = None
        self.count = 0
        """Layers with a router."""
        for block in _blocks(language_model):
            children = dict(block.named_children())
            router = children["gate"] if "gate" in children else children["router"]
            router.register_forward_hook(self._note)
            self.count += 1

    def check(self) -> None:
        """Raises ModelError: the balance of these routers has no meaning here."""
        if self.count and not self._known:
            raise ModelError(
                f"{self._source}: transformers has no load-balancing loss for this mixture of experts (its routers "
                "give no softmax over experts): set model.router_aux_coef to 0"
            )

    @contextmanager
    def listening(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Collects (logits [N, E], chosen experts [N, K]) of each layer; what runs later (layers that are recomputed in
        the backward pass) is not heard.
        """
        self._seen = seen = []
        try:
            yield seen
        finally:
            self._seen = None

    def _note(self, router: nn.Module, inputs: Any, output: Any) -> None:
        if self._seen is not None:
            logits, _, chosen = output
            self._seen.append((logits, chosen))
