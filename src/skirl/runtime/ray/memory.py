"""What the memory phases of shared GPUs do on Ray: engines sleep and wake, ranks give back and take again."""

from collections.abc import Callable, Mapping

from skirl.records import CommitReport
from skirl.runtime.ray.engines import Engines
from skirl.runtime.ray.ranks import Ranks

__all__ = ["RayPhaseActions"]


class RayPhaseActions:
    """``phases.PhaseActions`` over the processes of a run.

    Args:
        ranks: the training ranks.
        send: a commit to all engines: (version, whole).
    """

    def __init__(self, engines: Engines, ranks: Callable[[], Ranks], send: Callable[[int, bool], CommitReport]) -> None:
        self._engines, self._ranks, self._send = engines, ranks, send

    def sleep_engines(self, level: int) -> None:
        """All engines give back their GPU memory."""
        self._engines.call("putting the engines to sleep", lambda actor: actor.sleep.remote(level))

    def wake_engine_weights(self) -> None:
        """Memory for the weights."""
        self._engines.call("waking the engines", lambda actor: actor.wake.remote(["weights"]))

    def wake_engine_cache(self) -> None:
        """Memory for the KV cache."""
        self._engines.call("waking the engines", lambda actor: actor.wake.remote(["kv_cache"]))

    def offload_trainer(self) -> None:
        """Optimizer state, gradients, cached memory."""
        self._ranks().call("offloading the trainer", lambda actor: actor.give_back.remote())

    def reload_trainer(self) -> None:
        """What was given back."""
        self._ranks().call("reloading the trainer", lambda actor: actor.take_back.remote())

    def send_weights(self, version: int, *, whole: bool) -> CommitReport:
        """A weight commit to all engines."""
        return self._send(version, whole)

    def policy_version(self) -> int:
        """The trainer's."""
        return self._ranks().call_one(0, "the policy version", lambda actor: actor.policy_version.remote())

    def peak_bytes(self) -> Mapping[str, int]:
        """By kind of process, the largest of each."""
        peaks = [peak for _, peak in self._ranks().call("reading the memory", lambda actor: actor.memory.remote())]
        return {"trainer": max(peaks)} if any(peaks) else {}
