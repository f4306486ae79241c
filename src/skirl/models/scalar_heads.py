"""Checkpoints whose head gives one number a token: class names, and what their config.json says.

critics, process reward models   ``...ForTokenClassification``, one label: a number at every token
reward models                    ``...ForSequenceClassification``, one label: the number at the last token
audio models                     transformers has no such classes: their native layout with ``score.*`` beside the rest,
                                 under the class name that transformers would give it; read by ``load_value_model``
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from skirl.errors import ModelError

__all__ = [
    "HEAD",
    "HeadKind",
    "ScalarHead",
    "TextForm",
    "class_name",
    "has_scalar_head",
    "pad_id",
    "stored_head",
    "with_head",
]

HeadKind = Literal["token", "sequence"]

HEAD = "score"
"""Module path of the head in every such class."""

ENDINGS: Mapping[HeadKind, str] = {"token": "ForTokenClassification", "sequence": "ForSequenceClassification"}
MEAN, STD, FORM = "skirl_reward_mean", "skirl_reward_std", "skirl_reward_form"
SEPARATOR = "skirl_step_separator"

TextForm = Literal["chat", "answer", "answer_and_end"]
"""What a score is read at the end of. "chat": the whole conversation as the chat template closes it, the custom of
checkpoints from elsewhere. The others are how skirl trains: the prompt up to where the answer starts, and the answer's
own tokens; reward models read at the end token after it, process reward models where the last step's separator ends.
"""


@dataclass
class ScalarHead:
    """What a checkpoint with a scalar head says of it.

    Attributes:
        kind: of the class that it is written as.
        mean, std: of the scores over the data that the model was fitted to, raw; None where they were never measured.
        form: of the texts that it was trained on, as the checkpoint says; None for one from elsewhere.
        separator: text that ends each step for a process reward model; None for every other model.
    """

    kind: HeadKind
    mean: float | None = None
    std: float | None = None
    form: TextForm | None = None
    separator: str | None = None

    def set_scores(self, mean: float, std: float) -> None:
        """What the next export stores. Raises ModelError: not finite, or no spread."""
        if not (abs(mean) < float("inf") and 0 < std < float("inf")):
            raise ModelError(
                f"scores of the reward model have mean {mean} and standard deviation {std}: they cannot be standardised"
                " by these; it gives every response the same score, or one that is not finite"
            )
        self.mean, self.std = mean, std


def has_scalar_head(raw: Mapping[str, Any]) -> bool:
    """A config.json names a class with a head for classes or numbers instead of text."""
    return any("Classification" in name for name in raw.get("architectures") or ())


def stored_head(raw: Mapping[str, Any], num_labels: int, where: Path) -> ScalarHead | None:
    """What config.json says of its head; None for a model that writes text.

    Args: num_labels: of the config that transformers made of it.

    Raises: ModelError: it is a classifier of some other kind.
    """
    if not has_scalar_head(raw):
        return None
    found = raw["architectures"][0]
    kinds: list[HeadKind] = [kind for kind, ending in ENDINGS.items() if found.endswith(ending)]
    if not kinds:
        wanted = " or ".join("..." + ending for ending in ENDINGS.values())
        raise ModelError(f"{where}: {found} has no scalar head that skirl knows; it must be {wanted}")
    if num_labels != 1:
        raise ModelError(f"{where}: the head of {found} gives {num_labels} numbers a token; a scalar head gives 1")
    return ScalarHead(kinds[0], raw.get(MEAN), raw.get(STD), raw.get(FORM), raw.get(SEPARATOR))


def class_name(model_type: str, kind: HeadKind, where: Path) -> str:
    """Class of transformers for a text model with a scalar head.

    Raises: ModelError: there is none for this architecture.
    """
    from transformers.models.auto import modeling_auto

    names: Mapping[str, str] = {
        "token": modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
        "sequence": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    }[kind]
    if model_type not in names:
        raise ModelError(
            f"{where}: transformers has no class ...{ENDINGS[kind]} for model_type {model_type!r}, so a model with a "
            "scalar head of this architecture could not be saved for others to load; start from another architecture "
            "(llama, qwen2, qwen3, mistral, ... have one)"
        )
    return names[model_type]


def pad_id(tokenizer: Any, ends: tuple[int, ...] = ()) -> int | None:
    """A pad token that no text ends with: ``...ForSequenceClassification`` reads the last token that is none.

    The tokenizer's own, unless it is also an end token; then another special token; None where there is none, with
    which transformers scores one text at a time, and right.
    """
    taken = {tokenizer.eos_token_id, *ends}
    special = [tokenizer.pad_token_id, *tokenizer.all_special_ids]
    return next((int(token) for token in special if token is not None and token not in taken), None)


def with_head(config: Mapping[str, Any], head: ScalarHead, causal: str, pad: int | None) -> dict[str, Any]:
    """What config.json says, with this head in place of the causal model's, or of the head that the model started with.

    Mean, standard deviation and separator are this head's or none: those of the start say nothing of its scores.

    Args: causal: class name of the model without the head, or with it. pad: see ``pad_id``.
    """
    stem = causal.split("For")[0]
    entries: dict[str, Any] = {
        "architectures": [stem + ENDINGS[head.kind]],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        FORM: "answer_and_end" if head.kind == "sequence" else "answer",
    }
    if head.kind == "sequence":
        entries["pad_token_id"] = pad
    if head.mean is not None:
        entries |= {MEAN: head.mean, STD: head.std}
    if head.separator is not None:
        entries[SEPARATOR] = head.separator
    return {key: value for key, value in config.items() if key not in (MEAN, STD, SEPARATOR)} | entries
