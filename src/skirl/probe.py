"""The proof that weights arrived and mean the same: engine and trainer score one probe response, and must agree.

commit -> the engines sample a response to the probe prompt, as in training -> the trainer scores the same tokens
differences within tolerance -> metrics;  above -> three experiments -> likely cause -> warning, event, metrics
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from skirl.config.schema import ProbeConfig
from skirl.planning.schedule import scoring_plan
from skirl.protocols import GroupSampler, Trainer
from skirl.records import Prompt, Ratio, Rollout, Sampling
from skirl.step import rollout_sequence

__all__ = ["TOLERANCE", "Cause", "Difference", "Probe", "choose_prompt", "sampled_by", "scored_by"]

log = logging.getLogger(__name__)

Cause = Literal["cache", "sampling", "weights", "numerics"]
Sample = Callable[[Sampling, str], Sequence[Rollout]]
Score = Callable[[Sequence[Rollout], Sampling], Sequence[npt.NDArray[np.float32]]]

TOLERANCE: Mapping[str, float] = {"float32": 1e-3, "bfloat16": 0.5}
"""Largest difference that passes, nats, by ``model.dtype``; ``rollout.probe.tolerance`` overrides it."""

_FADED = 3.0
"""An experiment explains a difference that it makes so many times smaller, and that passes then."""

_ADVICE: Mapping[Cause, str] = {
    "cache": "A cache still held what older weights had computed. All caches are dropped now and the difference is "
    "gone, but responses since that commit were sampled from it, and the next commit may leave it behind again: set "
    "rollout.vllm.enable_prefix_caching to false until it is mended.",
    "sampling": "They agree at temperature 1 without top-p, top-k and min-p, so that weights and caches are right and "
    "the sampling distributions differ: leave rollout.sampling at temperature 1.0, top_p 1.0, top_k 0, min_p 0.0, and "
    "look in rollout.vllm for arguments that change log-probs.",
    "weights": "An earlier commit had left tensors behind. All weights were sent again and the difference is gone, but "
    "the next commit sends only trained tensors again: keep rollout.commit.checksum on and look in the log for "
    "tensors that are listed as frozen and yet change.",
    "numerics": "Neither caches nor sampling nor weights explain it, so that engine and trainer compute differently: "
    "another dtype (model.dtype against rollout.vllm.dtype), quantisation, kernels, or not the same model. If that is "
    "meant, raise rollout.probe.tolerance.",
}


@dataclass(frozen=True, slots=True)
class Difference:
    """|engine - trainer| log-probs over tokens, nats; infinite where a log-prob of either side is not finite."""

    largest: float
    total: float
    num_tokens: int

    @property
    def mean(self) -> float:
        """Over tokens."""
        return self.total / self.num_tokens


class Probe:
    """Compares engines and trainer after the first commit and then after every ``config.every``.

    Engines must be awake; the trainer needs its weights, not its optimizer. A comparison costs one response an engine;
    one that fails costs up to three more and a whole commit.

    Args:
        config: how often, how many tokens, which tolerance.
        dtype: ``model.dtype``, for the tolerance where none is set.
        sampling: the run's distribution; its budget is cut to ``config.num_tokens``.
        sample: (sampling, key) -> responses to the probe prompt, one an engine; through the engines' caches, as in
            training. Equal keys give equal seeds.
        score: (rollouts, sampling) -> for each [T] float32 log-probs of its response under the trainer's weights.
        invalidate_caches: drops every cache of every engine; None leaves that experiment out.
        commit_whole: sends all weights of the current version again; None leaves that experiment out.
        event: ``Tracker.event``.
    """

    def __init__(
        self,
        config: ProbeConfig,
        *,
        dtype: str,
        sampling: Sampling,
        sample: Sample,
        score: Score,
        invalidate_caches: Callable[[], object] | None,
        commit_whole: Callable[[], object] | None,
        event: Callable[..., None],
    ) -> None:
        self._every = config.every
        self._tolerance = TOLERANCE[dtype] if config.tolerance is None else config.tolerance
        self._sampling = replace(sampling, max_new_tokens=min(config.num_tokens, sampling.max_new_tokens))
        self._sample, self._score, self._event = sample, score, event
        self._invalidate_caches, self._commit_whole = invalidate_caches, commit_whole
        self._commits = 0
        self._warned: set[Cause] = set()

    def after_commit(self, version: int) -> dict[str, Ratio]:
        """probe/* where a comparison is due, else nothing. Call it once after each commit."""
        due = self._commits % self._every == 0
        self._commits += 1
        return self.check(version) if due else {}

    def check(self, version: int) -> dict[str, Ratio]:
        """Compares now; a difference above the tolerance is explained, never raised.

        Args: version: the engines' and the trainer's, for seeds and messages.
        """
        found = self._compare(version, self._sampling)
        if found is None:
            return {}
        if found.largest > self._tolerance:
            self._alarm(version, found)
        return {
            "probe/max_logprob_difference": Ratio(found.largest, 1),
            "probe/mean_logprob_difference": Ratio(found.total, found.num_tokens),
        }

    def _compare(self, version: int, sampling: Sampling) -> Difference | None:
        """None where no token was sampled."""
        rollouts = [r for r in self._sample(sampling, f"probe {version}") if len(r.response_ids)]
        if not rollouts:
            log.warning("probe after version %d: no token was sampled, so nothing was compared", version)
            return None
        scored = self._score(rollouts, sampling)
        return _difference([(r.logprobs, values) for r, values in zip(rollouts, scored, strict=True)])

    # ------------------------------------------------------------------------------------------------------------ alarm
    def _alarm(self, version: int, found: Difference) -> None:
        cause, tried = self._diagnose(version, found)
        healed = cause in ("cache", "weights")
        self._event(
            "probe_alarm",
            version=version,
            cause=cause,
            healed=healed,
            tolerance=self._tolerance,
            max_logprob_difference=found.largest,
            mean_logprob_difference=found.mean,
            num_tokens=found.num_tokens,
            experiments={name: difference.largest for name, difference in tried.items()},
        )
        if cause in self._warned:
            return
        self._warned.add(cause)
        figures = ", ".join(f"{_EXPERIMENTS[name]}: {after.largest:.3g}" for name, after in tried.items())
        log.warning(
            "probe after version %d: log-probs of engine and trainer differ by up to %.3g (mean %.3g over %d tokens, "
            "tolerance %.3g). Likely cause: %s. %s (Largest difference after experiments: %s. Another alarm of this "
            "cause goes to events.jsonl and probe/max_logprob_difference only.)",
            version,
            found.largest,
            found.mean,
            found.num_tokens,
            self._tolerance,
            cause,
            _ADVICE[cause],
            figures or "none could be made",
        )

    def _diagnose(self, version: int, found: Difference) -> tuple[Cause, dict[Cause, Difference]]:
        """The first experiment after which the difference is gone, and what each showed."""
        plain = replace(self._sampling, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
        tried: dict[Cause, Difference] = {}
        experiments: tuple[tuple[Cause, Callable[[], object] | None, Sampling], ...] = (
            ("cache", self._invalidate_caches, self._sampling),
            ("sampling", None if plain == self._sampling else lambda: None, plain),
            ("weights", self._commit_whole, self._sampling),
        )
        for cause, act, sampling in experiments:
            if act is None:
                continue
            act()
            after = self._compare(version, sampling)
            if after is None:
                continue
            tried[cause] = after
            # Dividing logits by a temperature below 1 scales every difference: that alone is no explanation.
            scale = min(self._sampling.temperature, 1.0) if cause == "sampling" else 1.0
            if after.largest <= self._tolerance and after.largest * _FADED <= found.largest * scale:
                return cause, tried
        return "numerics", tried


_EXPERIMENTS: Mapping[Cause, str] = {
    "cache": "all caches dropped",
    "sampling": "temperature 1 without filters",
    "weights": "all weights sent again",
}


def _difference(pairs: Sequence[tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]]) -> Difference:
    largest, total, num_tokens = 0.0, 0.0, 0
    for engine, trainer in pairs:
        assert engine.shape == trainer.shape, (engine.shape, trainer.shape)
        finite = np.isfinite(engine) & np.isfinite(trainer)
        with np.errstate(invalid="ignore"):  # inf - inf, replaced here
            apart = np.where(finite, np.abs(engine.astype(np.float64) - trainer.astype(np.float64)), math.inf)
        largest, total, num_tokens = (
            max(largest, float(apart.max())),
            total + float(apart.sum()),
            num_tokens + len(apart),
        )
    return Difference(largest, total, num_tokens)


# --------------------------------------------------------------------------------------------------------------- wiring
def choose_prompt(prompts: Sequence[Prompt]) -> Prompt:
    """The longest of the first 64: engines cache whole blocks of tokens, so that a short prompt would pass by them."""
    return max(prompts[:64], key=lambda prompt: len(prompt.input_ids))


def sampled_by(samplers: Sequence[GroupSampler], prompt: Prompt) -> Sample:
    """``sample`` of a probe: one response from each sampler (``Router.sample`` of one engine, or of all)."""

    def sample(sampling: Sampling, key: str) -> list[Rollout]:
        groups = [sampler(key, [prompt], sampling, 1, _ignore) for sampler in samplers]
        return [rollout for (group,) in groups for rollout in group.rollouts]

    return sample


def scored_by(trainer: Trainer, prompt: Prompt, placeholder_id: int | None) -> Score:
    """``score`` of a probe by the trainer's current weights.

    Args: placeholder_id: token id of audio placeholders; None for text models.
    """

    def score(rollouts: Sequence[Rollout], sampling: Sampling) -> list[Any]:
        sequences = [
            replace(rollout_sequence(prompt, rollout, placeholder_id), id=f"{prompt.id}#{number}")
            for number, rollout in enumerate(rollouts)
        ]
        longest = max(sequence.num_tokens for sequence in sequences)
        plan = scoring_plan(sequences, num_ranks=trainer.num_ranks, max_tokens=longest)
        return trainer.logprobs(plan, "policy", sampling)

    return score


def _ignore(_: object) -> None:
    """Nobody watches a probe's progress."""
