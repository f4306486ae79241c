"""What the memory phases of shared GPUs do on Ray: engines sleep and wake, ranks give back and take again."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from skirl.errors import EngineDied
from skirl.records import CommitReport
from skirl.runtime.ray.calls import DiedError
from skirl.runtime.ray.engines import Engines
from skirl.runtime.ray.ranks import Ranks

__all__ = ["RayPhaseActions"]

log = logging.getLogger(__name__)


class RayPhaseActions:
    """``phases.PhaseActions`` over the processes of a run.

    Args:
        ranks: the training ranks.
        send: a commit to all engines: (version, whole).
        weights_lost: called where an engine had to be replaced, so that the next commit is a whole one.
    """

    def __init__(
        self,
        engines: Engines,
        ranks: Callable[[], Ranks],
        send: Callable[[int, bool], CommitReport],
        *,
        weights_lost: Callable[[], None],
    ) -> None:
        self._engines, self._ranks, self._send, self._weights_lost = engines, ranks, send, weights_lost

    def sleep_engines(self, level: int) -> None:
        """All engines give back their GPU memory."""
        if self._call("putting the engines to sleep", lambda actor: actor.sleep.remote(level)):
            self._weights_lost()

    def wake_engine_weights(self) -> None:
        """Memory for the weights."""
        if self._call("waking the engines", lambda actor: actor.wake.remote(["weights"])):
            self._weights_lost()

    def wake_engine_cache(self) -> None:
        """Memory for the KV cache. The weights came before, so those of an engine that was replaced come again."""
        if self._call("waking the engines", lambda actor: actor.wake.remote(["kv_cache"])):
            self._send(self.policy_version(), True)

    def _call(self, what: str, of: Callable[[Any], Any]) -> int:
        """One call on every engine, again where one had died; returns how many were replaced.

        A new process is awake: what vLLM is to wake in it, or puts to sleep twice in the others, it leaves as it is.
        """
        replaced = 0
        while True:
            try:
                self._engines.call(what, of)
                return replaced
            except (DiedError, EngineDied) as death:
                found = self._engines.replace_dead()
                if not found:
                    raise
                replaced += found
                log.warning("%s is done again: %s", what, death)

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
