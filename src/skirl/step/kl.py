"""KL to the reference on the host: penalties in the reward, and the controller that moves their factor."""

from collections.abc import Mapping, Sequence
from typing import Any

from skirl.algorithms.kl import KL_ESTIMATORS, adapted_coef
from skirl.config.algorithms import KLConfig
from skirl.records import Doubles, Ratio, TrainingSequence
from skirl.step.sequences import doubles

__all__ = ["KLController", "kl_of_responses", "kl_per_token"]


def kl_per_token(sequence: TrainingSequence, estimator: str) -> Doubles:
    """[T] k(policy when sampled, reference), float64.

    The policy's log-probs are the trainer's where the method has them, else the engine's: then the reference, which the
    trainer scores, differs in its weights alone.
    """
    sampled = sequence.rollout_logprobs if sequence.old_logprobs is None else sequence.old_logprobs
    assert sampled is not None
    assert sequence.reference_logprobs is not None
    return KL_ESTIMATORS[estimator](doubles(sampled), doubles(sequence.reference_logprobs)).numpy()


def kl_of_responses(sequences: Sequence[TrainingSequence]) -> Ratio:
    """KL(policy when sampled, reference) a response: sum over all tokens of k1 by the number of responses.

    Source: Ziegler et al., arXiv:1909.08593, section 2.2 (the KL that the controller is fed with).
    """
    return Ratio(float(sum(kl_per_token(s, "k1").sum() for s in sequences)), float(len(sequences)))


class KLController:
    """The factor of the KL: fixed, or steered towards a target after each step."""

    def __init__(self, config: KLConfig | None) -> None:
        self._adaptive = None if config is None else config.adaptive
        self.coef = 0.0 if config is None else config.coef
        """Factor in use."""

    def observe(self, kl: Ratio) -> None:
        """Moves the factor, if it moves: ``kl`` is that of the step's responses, see ``kl_of_responses``."""
        if self._adaptive is None or not kl.denominator:
            return
        self.coef = adapted_coef(
            self.coef,
            kl.value,
            target=self._adaptive.target,
            horizon=self._adaptive.horizon,
            num_responses=round(kl.denominator),
        )

    def state(self) -> Mapping[str, Any]:
        """JSON-able; empty where the factor is fixed, so that the recipe's counts."""
        return {} if self._adaptive is None else {"coef": self.coef}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from ``state``; does nothing where the factor is fixed."""
        if self._adaptive is not None and "coef" in state:
            self.coef = float(state["coef"])
