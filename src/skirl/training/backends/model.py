"""What a backend trains: any module with the outer interface of ``models.policy.PackedModel``."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from skirl.models.adapters import NamedWeight
from skirl.models.loading import LoadedModel
from skirl.models.policy import PackedRow
from skirl.records import Sampling

__all__ = ["TrainedModel"]


class TrainedModel(Protocol):
    """A ``torch.nn.Module`` that is called on packed rows: policy, value model, policy beside its teacher.

    Parameters without ``requires_grad`` are carried along and not trained. Whatever of the module is no registered
    parameter (a frozen encoder, a teacher) is neither sharded, nor saved, nor averaged.
    """

    @property
    def device(self) -> torch.device:
        """Where rows must lie."""
        ...

    @property
    def loaded(self) -> LoadedModel:
        """The Hugging Face model that is trained, and what belongs to it."""
        ...

    def __call__(self, row: PackedRow, sampling: Sampling, /) -> tuple[Tensor, Tensor, Tensor]:
        """What an objective reads, float32: two numbers [A] an action token, and auxiliary losses [S] of sequences
        that are already times their factor; those empty where the model has none.
        """
        ...

    def named_model_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All that is held on the device."""
        ...

    def committed_weights(self) -> dict[str, NamedWeight]:
        """What engines hold, by name, in the same order on every rank."""
        ...

    def exported_weights(self) -> dict[str, NamedWeight]:
        """What a checkpoint of the model holds, by name."""
        ...

    def adapter_weights(self) -> dict[str, NamedWeight]:
        """The adapters alone."""
        ...

    # --------------------------------------------------------------------------------------------- of torch.nn.Module
    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Every registered parameter once."""
        ...

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The same with names; "head" is a part of the name of the head's parameters and of no other."""
        ...

    def modules(self) -> Iterator[nn.Module]:
        """Every module inside."""
        ...

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Frees the gradients."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints of the trainer."""
        ...

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """The same, back."""
        ...
