"""Which transport a placement allows.

all processes need a GPU for the GPU transports; one machine for shared memory; gloo works everywhere
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from skirl.errors import ConfigError
from skirl.weights.endpoints import Place
from skirl.weights.manifest import TransportName

__all__ = ["Choice", "choose_transport"]

_SETTING = "rollout.commit.transport"
_PLACEMENT = "runtime.placement"


@dataclass(frozen=True, slots=True)
class Choice:
    """A transport and one line that says why, for the log."""

    name: TransportName
    reason: str


@dataclass(frozen=True, slots=True)
class _Facts:
    workers: int
    shared: int
    """Engine workers on a GPU of a training rank."""
    on_gpu: bool
    """Every rank and worker is."""
    remote: int
    """Engine workers on other machines than training rank 0."""
    node: str
    """Of training rank 0."""

    @property
    def shared_text(self) -> str:
        return f"{self.shared} of {self.workers} engine workers are on GPUs of training ranks"

    @property
    def remote_text(self) -> str:
        return f"{self.remote} of {self.workers} engine workers are not on {self.node}, where training rank 0 is"


def choose_transport(
    ranks: Sequence[Place],
    engines: Sequence[Sequence[Place]],
    requested: Literal["auto"] | TransportName,
    *,
    asynchronous: bool = False,
) -> Choice:
    """The requested transport if it can work here; for "auto" the fastest that can.

    Args:
        ranks: training ranks, in order. engines: the workers of each.
        asynchronous: engines sample while the trainer works.

    Raises:
        ConfigError: with the numbers that stand against it.
    """
    facts = _facts(ranks, engines)
    if requested == "auto":
        choice = _fastest(facts)
    else:
        choice = Choice(requested, f"{_SETTING} = {requested}")
        _REFUSALS[requested](facts)
    if asynchronous and facts.shared:
        raise ConfigError(
            f"{facts.shared_text} ({_PLACEMENT}): weights go there by cuda_ipc while nobody works, but in asynchronous "
            "training engines sample while the trainer works, which needs GPUs of their own. Give rollout a group "
            f"without policy in {_PLACEMENT}, or train synchronously"
        )
    return choice


def _facts(ranks: Sequence[Place], engines: Sequence[Sequence[Place]]) -> _Facts:
    workers = [worker for engine in engines for worker in engine]
    assert ranks, "a commit has a sender"
    assert workers, "a commit has a receiver"
    gpus = {(rank.node, rank.gpu) for rank in ranks if rank.gpu is not None}
    return _Facts(
        workers=len(workers),
        shared=sum((worker.node, worker.gpu) in gpus for worker in workers),
        on_gpu=all(place.gpu is not None for place in (*ranks, *workers)),
        remote=sum(worker.node != ranks[0].node for worker in workers),
        node=ranks[0].node,
    )


def _fastest(facts: _Facts) -> Choice:
    if facts.on_gpu:
        if facts.shared == facts.workers:
            return Choice("cuda_ipc", f"all {facts.workers} engine workers are on GPUs of training ranks")
        if facts.shared:
            raise ConfigError(
                f"{facts.shared_text}, {facts.workers - facts.shared} are on others: weights can go by cuda_ipc to all "
                f"of them or by nccl to all, not by both. {_PLACEMENT} must put rollout on GPUs of the policy only, or "
                "on none of them"
            )
        return Choice("nccl", f"none of the {facts.workers} engine workers is on a GPU of a training rank")
    if facts.remote:
        return Choice("gloo", f"not every process has a GPU, and {facts.remote_text}")
    return Choice("shared_memory", f"not every process has a GPU, and all are on {facts.node}")


def _refuse_cuda_ipc(facts: _Facts) -> None:
    if facts.shared < facts.workers:
        raise ConfigError(
            f"{_SETTING} = cuda_ipc needs every engine worker on the GPU of a training rank; "
            f"{facts.workers - facts.shared} of {facts.workers} are not. Set it to auto, or put rollout and policy "
            f"into one group of {_PLACEMENT}"
        )


def _refuse_nccl(facts: _Facts) -> None:
    if not facts.on_gpu:
        raise ConfigError(f"{_SETTING} = nccl needs a GPU for every training rank and engine worker. Set it to auto")
    if facts.shared:
        raise ConfigError(
            f"{_SETTING} = nccl works between different GPUs only; {facts.shared_text}. Set it to auto, or give "
            f"rollout a group of its own in {_PLACEMENT}"
        )


def _refuse_shared_memory(facts: _Facts) -> None:
    if facts.remote:
        raise ConfigError(f"{_SETTING} = shared_memory works on one machine only; {facts.remote_text}. Set it to auto")


def _refuse_nothing(facts: _Facts) -> None:
    """gloo goes through the host's memory and the network: it can always work."""


_REFUSALS = {
    "cuda_ipc": _refuse_cuda_ipc,
    "nccl": _refuse_nccl,
    "shared_memory": _refuse_shared_memory,
    "gloo": _refuse_nothing,
}
