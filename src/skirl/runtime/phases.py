"""Memory phases of GPUs that engines and trainer share: which is awake, what moves, in which order.

    generate -> engines sleep -> trainer takes its state back -> train
    train    -> trainer gives its state back -> engines wake their weights -> commit
    commit   -> engines wake their KV cache -> generate

Pure bookkeeping: whoever owns the processes hands in what each action does. On GPUs of their own nothing moves. Many
threads may call: one switches, the others wait for it.
"""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Literal, NoReturn, Protocol, TypeVar

from skirl.errors import SkirlError, WorkerError
from skirl.records import CommitReport, Ratio

__all__ = ["EngineState", "Phase", "PhaseActions", "Phases", "TrainerState"]

log = logging.getLogger(__name__)

T = TypeVar("T")

Phase = Literal["generate", "train", "commit"]

EngineState = Literal["awake", "weights", "asleep", "unknown"]
"""awake: weights and KV cache are on the GPU. weights: the KV cache is not. unknown: an action failed half-way."""

TrainerState = Literal["resident", "offloaded", "unknown"]
"""resident: optimizer and gradients are on the GPU. offloaded: the trainer keeps its weights there, no more."""


class PhaseActions(Protocol):
    """What the machine asks for. Each call is made for all engines or all ranks, and returns when all are done."""

    def sleep_engines(self, level: int) -> None:
        """Engines give back weights and KV cache; called only when they are wholly awake.

        Args: level: 1 moves the weights to the host, 2 drops them. The KV cache is dropped by both.
        """
        ...

    def wake_engine_weights(self) -> None:
        """Memory of the weights; after level 1 with their values, after level 2 with none."""
        ...

    def wake_engine_cache(self) -> None:
        """Memory of the KV cache; the engines are wholly awake then."""
        ...

    def offload_trainer(self) -> None:
        """The trainer gives back optimizer state, gradients and cached memory; its weights stay."""
        ...

    def reload_trainer(self) -> None:
        """The trainer takes back what ``offload_trainer`` gave."""
        ...

    def send_weights(self, version: int, *, whole: bool) -> CommitReport:
        """A weight commit. ``whole``: engines hold nothing that could be kept, so frozen tensors are sent too."""
        ...

    def policy_version(self) -> int:
        """The version that the trainer holds."""
        ...

    def peak_bytes(self) -> Mapping[str, int]:
        """Largest GPU memory of each kind of process ("engine", "trainer") since the call before; empty on the CPU."""
        ...


class Phases:
    """Knows what is on the GPUs and makes it what a phase needs.

    An action that fails leaves its side ``unknown``, and no phase can be entered any more: the error says which action
    it was. A commit that fails is another matter: engines have no weights then, and the next commit is a whole one.

    Args:
        actions: what the processes do.
        shared: engines and trainer share GPUs; else ``enter`` does nothing.
        sleep_level: of the engines while the trainer works: 1 or 2.
        offload: the trainer gives memory back while engines sample (``trainer.offload``).
        start: how the processes were built. "train": engines asleep at ``sleep_level``, trainer resident.
            "generate": engines awake, trainer offloaded. Either way the first commit is a whole one.
    """

    def __init__(
        self,
        actions: PhaseActions,
        *,
        shared: bool,
        sleep_level: int,
        offload: bool = True,
        start: Literal["generate", "train"] = "train",
    ) -> None:
        if sleep_level not in (1, 2):
            raise ValueError(f"engines sleep at level 1 or 2, not {sleep_level}")
        self._actions, self._shared, self._level, self._offload = actions, shared, sleep_level, offload
        self._phase: Phase = start
        asleep = shared and start == "train"
        self._engines: EngineState = "asleep" if asleep else "awake"
        self._trainer: TrainerState = "offloaded" if shared and offload and start == "generate" else "resident"
        self._held: int | None = None
        self._lock = threading.RLock()
        self._failed = ""
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._peaks: dict[str, float] = {}

    @property
    def phase(self) -> Phase:
        """The phase entered last; while one side is unknown, the one before the failure."""
        return self._phase

    @property
    def engines(self) -> EngineState:
        """What of the engines is on the GPUs."""
        return self._engines

    @property
    def trainer(self) -> TrainerState:
        """What of the trainer is on the GPUs."""
        return self._trainer

    @property
    def held_version(self) -> int | None:
        """The version that all engines hold whole, awake or (level 1) asleep; None: the next commit must be whole."""
        return self._held

    def enter(self, phase: Phase) -> None:
        """Makes the GPUs ready for a phase; nothing happens where they are.

        Entering "generate" commits the trainer's weights where engines do not hold them: before the first commit, when
        a level-2 sleep dropped them, and when the trainer went on without a commit.

        Raises:
            WorkerError, or the SkirlError of the action: an action failed, now or before; the message names it.
        """
        with self._lock:
            self._refuse_unknown(phase)
            without_weights = self._shared and phase == "generate" and self._held is None
            if phase == self._phase and not without_weights:
                return
            if not self._shared:
                self._note_peaks()
            else:
                {"generate": self._to_generate, "train": self._to_train, "commit": self._to_commit}[phase]()
            self._arrive(phase)

    def commit(self, version: int) -> CommitReport:
        """Enters "commit" and sends the weights: all of them where engines hold none, else the trained ones."""
        with self._lock:
            self.enter("commit")
            return self._send(version)

    def weights_lost(self) -> None:
        """An engine was replaced, or failed while weights arrived: the next commit is a whole one."""
        with self._lock:
            self._held = None

    def take_report(self) -> dict[str, Ratio]:
        """Metrics since the call before: seconds of each action (time/<action>_s) and of all (time/switch_s), and the
        largest memory of each phase that was left (memory/<phase>/<process>_peak_gb).
        """
        with self._lock:
            report = {f"time/{action}_s": Ratio(seconds, 1) for action, seconds in self._seconds.items()}
            if report:
                report["time/switch_s"] = Ratio(sum(self._seconds.values()), 1)
            report |= {name: Ratio(peak, 1) for name, peak in self._peaks.items()}
            self._seconds.clear()
            self._peaks = {}
        return report

    # ------------------------------------------------------------------------------------------------------ transitions
    def _to_train(self) -> None:
        if self._engines == "weights":
            self._wake_cache()  # engines can only fall asleep as a whole
        if self._engines == "awake":
            self._engines = "unknown"
            if self._level == 2:
                self._held = None
            self._timed("engines_sleep", lambda: self._actions.sleep_engines(self._level))
            self._engines = "asleep"
        self._note_peaks()
        if self._trainer == "offloaded":
            self._trainer = "unknown"
            self._timed("trainer_reload", self._actions.reload_trainer)
            self._trainer = "resident"

    def _to_commit(self) -> None:
        if self._trainer == "resident" and self._offload:
            self._trainer = "unknown"
            self._timed("trainer_offload", self._actions.offload_trainer)
            self._trainer = "offloaded"
        self._note_peaks()
        if self._engines == "asleep":
            self._engines = "unknown"
            self._timed("engines_wake_weights", self._actions.wake_engine_weights)
            self._engines = "weights"

    def _to_generate(self) -> None:
        self._to_commit()
        self._arrive("commit")  # a commit that fails below leaves the machine there
        version = self._actions.policy_version()
        if self._held != version:
            log.info("engines hold version %s: version %d is committed before they sample", self._held, version)
            self._timed("recommit", lambda: self._send(version))
        self._note_peaks()
        if self._engines == "weights":
            self._wake_cache()

    def _wake_cache(self) -> None:
        self._engines = "unknown"
        self._timed("engines_wake_cache", self._actions.wake_engine_cache)
        self._engines = "awake"

    def _send(self, version: int) -> CommitReport:
        whole, self._held = self._held is None, None
        report = self._actions.send_weights(version, whole=whole)
        self._held = version
        return report

    # ------------------------------------------------------------------------------------------------------ bookkeeping
    def _arrive(self, phase: Phase) -> None:
        log.debug("phase %s -> %s: engines %s, trainer %s", self._phase, phase, self._engines, self._trainer)
        self._phase = phase

    def _timed(self, action: str, call: Callable[[], T]) -> T:
        """Runs an action; its name stays behind in ``_failed`` where it does not return."""
        self._failed = action.replace("_", " ")
        began = time.perf_counter()
        try:
            done = call()
        except Exception as error:  # fence: what failed is named, and the error is raised again as what it is
            self._explain(error)
        self._seconds[action] += time.perf_counter() - began
        self._failed = ""
        return done

    def _explain(self, error: Exception) -> NoReturn:
        kind = type(error) if isinstance(error, SkirlError) else WorkerError
        state = f"engines {self._engines}, trainer {self._trainer}"
        raise kind(f"{self._failed} failed on leaving the phase {self._phase}: {error} ({state})") from error

    def _refuse_unknown(self, phase: Phase) -> None:
        unknown = [n for n, s in (("engines", self._engines), ("trainer", self._trainer)) if s == "unknown"]
        if unknown:
            raise WorkerError(
                f"cannot enter the phase {phase}: what the {' and '.join(unknown)} hold on the GPUs is unknown since "
                f"{self._failed} failed; start the run again with run.resume"
            )

    def _note_peaks(self) -> None:
        """Between giving back and taking, so that no phase is charged with what the one before held."""
        for process, size_bytes in self._actions.peak_bytes().items():
            name = f"memory/{self._phase}/{process}_peak_gb"
            self._peaks[name] = max(size_bytes / 1e9, self._peaks.get(name, 0.0))
