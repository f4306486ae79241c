"""Models with a scalar head: critics, reward models, process reward models. One number a token, on packed rows.

hidden [N, D] of the language model -> those of the tokens that are asked for [A, D] -> head -> values [A], float32
"""

from collections.abc import Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from skirl.errors import ModelError
from skirl.models import checkpoints
from skirl.models.clips import ClipStore
from skirl.models.families import TEXT
from skirl.models.loading import (
    LoadedModel,
    ModelFiles,
    check_loaded,
    load_tokenizer_and_family,
    prepared,
    read_weights,
)
from skirl.models.policy import PackedModel, PackedRow
from skirl.models.scalar_heads import HEAD, HeadKind, ScalarHead, class_name, stored_head
from skirl.records import Sampling

__all__ = ["ValueModel", "load_value_model"]


class LinearHead(nn.Module):
    """A Linear(D, 1) whose product is taken in float32. Holds the model's own parameters (ZeRO-3 gathers by module)."""

    def __init__(self, score: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = score.weight, score.bias

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [...] float32."""
        bias = None if self.bias is None else self.bias.float()
        return linear(hidden.float(), self.weight.float(), bias)[..., 0]


class ValueModel(PackedModel):
    """A scalar head on a language model; the outer interface of ``Policy``, with values in place of log-probs.

    Args:
        loaded: of ``load_value_model``; its attention must be ``PACKED_ATTENTION``.
        clips: encoder output by clip; None for text models.
        reads: where the number of an action token is read. "before": at the position that predicts the token, the
            state before it (critics). "at": at the token itself (reward models, process reward models).
    """

    head: LinearHead

    def __init__(self, loaded: LoadedModel, clips: ClipStore | None, reads: Literal["before", "at"]) -> None:
        assert loaded.scalar_head is not None, "a value model is loaded with load_value_model"
        super().__init__(loaded, clips, LinearHead(loaded.model.get_submodule(HEAD)))
        self.reads: Literal["before", "at"] = reads
        self.scalar_head: ScalarHead = loaded.scalar_head
        """What an export says of the head; ``set_scores`` stores mean and standard deviation of a reward model."""

    def forward(self, row: PackedRow, sampling: Sampling | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """(values [A], zeros [A], auxiliary losses [S]), float32; ``sampling`` has no meaning here."""
        hidden, auxiliary = self.hidden_with_auxiliary(row)
        values = self.head(hidden[row.predictors + int(self.reads == "at")])
        return values, torch.zeros_like(values), auxiliary


def load_value_model(
    path: Path | str,
    *,
    kind: HeadKind | None,
    dtype: Literal["float32", "bfloat16"],
    attn_implementation: str | dict[str, str] | None = None,
    gradient_checkpointing: bool = False,
) -> LoadedModel:
    """Loads a checkpoint with a scalar head, or a model that writes text, whose head is then replaced by a new one.

    A new head is all zeros: values start as the constant 0, which biases no advantage and prefers no response, where
    random ones would be noise of the size of the rewards. It needs no seed, and learns from the first step on.

    Args:
        kind: what it will be exported as. "token" (critics, process reward models) has a bias, "sequence" (reward
            models) has none, as in transformers. None is the kind of the checkpoint, which must have a head.
        dtype, attn_implementation, gradient_checkpointing: as in ``load_model``.

    Raises:
        ModelError: as ``load_model``; the head gives more than one number; transformers has no such class for the
            architecture.
    """
    files = load_tokenizer_and_family(path, scalar_heads=True)
    directory = Path(path)
    raw = checkpoints.read_json(directory / "config.json")
    found = stored_head(raw, files.config.num_labels, directory)
    head = _head_as(found, kind, directory)
    options = {"dtype": dtype, "attn_implementation": attn_implementation}
    if files.family is TEXT:
        model = _text_model(directory, files, found, head, options)
    else:
        model = _audio_model(directory, files, found, head, options)
    files = files._replace(family=replace(files.family, roles={**files.family.roles, "head": HEAD}))
    loaded = prepared(model, files, directory, gradient_checkpointing)
    loaded.scalar_head = head
    return loaded


def _head_as(found: ScalarHead | None, kind: HeadKind | None, directory: Path) -> ScalarHead:
    if found is None and kind is None:
        raise ModelError(f"{directory} has no scalar head: it is a model that writes text; `skirl rm` trains one on it")
    if found is not None and kind in (None, found.kind):
        return found
    assert kind is not None
    return ScalarHead(kind)


def _text_model(
    directory: Path, files: ModelFiles, found: ScalarHead | None, head: ScalarHead, options: dict[str, Any]
) -> Any:
    files.config.num_labels = 1
    name = class_name(files.config.model_type, head.kind, directory)
    model, info = read_weights(directory, files, name, **options)
    roles = files.family.roles
    head_module = dict(model.named_children()).get(HEAD)
    if not hasattr(model, roles["language_model"]) or not isinstance(head_module, nn.Linear):
        raise ModelError(f"{directory}: {name} has no {roles['language_model']} and {HEAD}, which is not supported")
    new = {n for n in info["missing_keys"] if n == HEAD + ".bias" or (found is None and n == HEAD + ".weight")}
    dropped = {roles["head"] + ".weight"} if found is None else set()
    dropped |= _bias_of_zero(directory, info["unexpected_keys"])
    check_loaded(model, _without(info, missing=new, unexpected=dropped), files.family, directory)
    for parameter in (model.get_parameter(n) for n in new):
        nn.init.zeros_(parameter)
    return model


def _audio_model(
    directory: Path, files: ModelFiles, found: ScalarHead | None, head: ScalarHead, options: dict[str, Any]
) -> Any:
    """The audio model with ``score`` in place of its language-model head."""
    family = files.family
    model, info = read_weights(directory, files, family.model_class, **options)
    score = nn.Linear(files.config.get_text_config().hidden_size, 1, bias=head.kind == "token", dtype=model.dtype)
    names = {f"{HEAD}.{name}" for name, _ in score.named_parameters()}
    if found is None:
        check_loaded(model, info, family, directory)
        values = {}
    else:
        old = {family.roles["head"] + ".weight"}
        values = checkpoints.read_tensors(directory, names)
        dropped = {*values, *_bias_of_zero(directory, info["unexpected_keys"])}
        missing = {*info["missing_keys"]} - old | names - {*values, HEAD + ".bias"}
        check_loaded(model, _without({**info, "missing_keys": missing}, unexpected=dropped), family, directory)
    for name, parameter in score.named_parameters():
        parameter.data.copy_(values.get(f"{HEAD}.{name}", torch.zeros(())))
    model.set_submodule(family.roles["head"], nn.Identity())
    model.add_module(HEAD, score)
    return model


def _bias_of_zero(directory: Path, unexpected: Any) -> set[str]:
    """The bias of a checkpoint's head that this class has no place for may go if it is 0."""
    bias = HEAD + ".bias"
    found = checkpoints.read_tensors(directory, {bias}) if bias in unexpected else {}
    return {name for name, value in found.items() if not value.any()}


def _without(
    info: Mapping[str, Any], *, missing: Set[str] = frozenset(), unexpected: Set[str] = frozenset()
) -> dict[str, Any]:
    """The report of what did not fit, less what is as it should be."""
    return {
        **info,
        "missing_keys": set(info["missing_keys"]) - missing,
        "unexpected_keys": set(info["unexpected_keys"]) - unexpected,
    }
