"""What a commit carries: the list of tensors, agreed on by both sides, and the messages that bring their values.

specs of trainer and of checkpoint -> Manifest -> bucket layouts -> Bucket messages -> engine
"""

import difflib
import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from skirl.errors import WeightSyncError
from skirl.records import TensorSpec

__all__ = ["DTYPE_BYTES", "Bucket", "Manifest", "TransportName", "compare", "size_bytes"]

TransportName = Literal["shared_memory", "cuda_ipc", "nccl", "gloo"]

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes of one value by dtype."""

_SHOWN = 8
"""Names of one kind of fault that a message lists."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Every tensor of one commit, in sending order.

    Attributes:
        version: policy version that the values belong to.
        tensors: what is sent. whole: all that the engine holds; else the trained ones.
    """

    version: int
    tensors: tuple[TensorSpec, ...]
    whole: bool

    @property
    def hash(self) -> str:
        """Of names, shapes and dtypes, in order; both sides compare it."""
        text = "\n".join(f"{t.name}|{t.shape}|{t.dtype}" for t in self.tensors)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Bucket:
    """One message: tensors laid one after another in a buffer of bytes.

    Attributes:
        index: place in the sending order, from 0. tensors: what it holds.
        offsets: first byte of each tensor. num_bytes: of the buffer, padding between tensors included.
        checksum: of the buffer; None where none is compared.
        payload: what the receiving end of the transport needs to reach the buffer, by GPU id where they differ
            ("" stands for any).
    """

    index: int
    tensors: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]
    num_bytes: int
    checksum: int | None
    payload: dict[str, bytes]


def size_bytes(spec: TensorSpec) -> int:
    """Bytes of the tensor's values; raises WeightSyncError for a dtype that is never sent."""
    if spec.dtype not in DTYPE_BYTES:
        raise WeightSyncError(
            f"{spec.name} is of dtype {spec.dtype}, which weight commits do not carry (they carry "
            f"{', '.join(DTYPE_BYTES)}); load the model in another dtype"
        )
    return math.prod(spec.shape) * DTYPE_BYTES[spec.dtype]


def compare(expected: Sequence[TensorSpec], sent: Sequence[TensorSpec], where: str) -> None:
    """Both lists hold the same names with the same shapes and dtypes, in any order.

    Args:
        where: who compares, for the message.

    Raises:
        WeightSyncError: names every tensor that is missing, not known, or of another shape or dtype (up to 8 of each).
    """
    known, came = {t.name: t for t in expected}, {t.name: t for t in sent}
    missing = [name for name in known if name not in came]
    unknown = [name for name in came if name not in known]
    both = [(known[name], came[name]) for name in known if name in came]
    faults = {
        "sent twice": [name for name, count in _counts(sent).items() if count > 1],
        "missing": missing,
        "not known": _with_renames(unknown, missing),
        "of another shape": [_reshaped(old, new) for old, new in both if old.shape != new.shape],
        "of another dtype": [f"{o.name} ({n.dtype}, not {o.dtype})" for o, n in both if o.dtype != n.dtype],
    }
    if any(faults.values()):
        lines = [f"{len(names)} {kind}: {_listed(names)}" for kind, names in faults.items() if names]
        raise WeightSyncError(
            f"{where}: the {len(sent)} tensors of this commit are not the {len(expected)} that are expected: "
            f"{'; '.join(lines)}. Trainer and engine must be made from the same checkpoint, in the same dtype"
        )


def _counts(specs: Iterable[TensorSpec]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for spec in specs:
        counts[spec.name] = counts.get(spec.name, 0) + 1
    return counts


def _with_renames(unknown: Sequence[str], missing: Sequence[str]) -> list[str]:
    """The unknown names, each with the missing one that it looks like. Only names that are shown are looked at."""
    texts = list(unknown)
    for place, name in enumerate(unknown[:_SHOWN]):
        if close := difflib.get_close_matches(name, missing, n=1):
            texts[place] = f"{name} (renamed? {close[0]} is missing)"
    return texts


def _reshaped(old: TensorSpec, new: TensorSpec) -> str:
    transposed = ", transposed" if sorted(old.shape) == sorted(new.shape) else ""
    return f"{old.name} ({list(new.shape)}, not {list(old.shape)}{transposed})"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
