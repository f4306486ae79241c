"""Held-out scoring with the run's engines: greedy transcripts, and samples for the expected error rate."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from skirl.config.schema import EvaluationConfig
from skirl.errors import DataError
from skirl.evaluation.error_rates import Evaluation, Utterance, evaluate, score_utterance
from skirl.protocols import GroupSampler
from skirl.records import Group, Prompt, Ratio, RewardSample, Sampling

__all__ = ["Evaluator", "as_metrics", "check_references"]

OnGroup = Callable[[Group], None]
ToSamples = Callable[[Group], list[RewardSample]]


def check_references(prompts: Sequence[Prompt]) -> None:
    """Raises DataError: a held-out prompt has no reference, so that there is nothing to count errors of."""
    unknown = [prompt.id for prompt in prompts if prompt.reference is None]
    if unknown:
        raise DataError(
            f"{len(unknown)} of {len(prompts)} held-out rows have no reference, such as {unknown[0]}: error rates need "
            "one. Give the rows of data.eval an answer, or leave them out"
        )


class Evaluator:
    """Transcribes held-out prompts and counts edits.

    The samples of the expected rate are keyed by prompt alone, so that two evaluations of one run, or of two models,
    draw the same random numbers and their difference is not blurred by chance.

    Args:
        sample: draws responses; the run's router.
        to_samples: parses responses.
        sampling: distribution of training; its budget and banned ids hold here too.
    """

    def __init__(
        self, config: EvaluationConfig, sample: GroupSampler, to_samples: ToSamples, sampling: Sampling, seed: int
    ) -> None:
        self._config, self._sample, self._to_samples, self._seed = config, sample, to_samples, seed
        budget = config.max_new_tokens or sampling.max_new_tokens
        plain = replace(sampling, top_p=1.0, top_k=0, min_p=0.0, max_new_tokens=budget)
        self._greedy = replace(plain, temperature=0.0)
        self._drawn = replace(plain, temperature=config.temperature)

    def run(self, prompts: Sequence[Prompt], on_group: OnGroup) -> Evaluation:
        """Scores all prompts; each has a reference, see ``check_references``."""
        check_references(prompts)
        greedy = self._sample("greedy", prompts, self._greedy, 1, on_group)
        drawn: list[Group] = []
        if self._config.samples:
            drawn = self._sample("expected", prompts, self._drawn, self._config.samples, on_group)
        sampled = {g.prompt.id: [s.transcript for s in self._to_samples(g)] for g in drawn}
        utterances = [self._utterance(group, sampled.get(group.prompt.id, [])) for group in greedy]
        return evaluate(utterances, bootstrap=self._config.bootstrap, seed=self._seed)

    def _utterance(self, group: Group, sampled: Sequence[str]) -> Utterance:
        prompt, best = group.prompt, self._to_samples(group)[0]
        return score_utterance(
            id=prompt.id.removeprefix(f"{prompt.source}/"),
            source=prompt.source,
            language=prompt.language,
            reference=prompt.reference or "",
            hypothesis=best.transcript,
            samples=sampled,
            unit=self._config.unit,
            truncated=best.finish_reason == "length",
        )


def as_metrics(evaluation: Evaluation) -> Mapping[str, Ratio]:
    """eval/<source>/* of every source."""
    metrics: dict[str, Ratio] = {}
    for rate in evaluation.sources:
        name, units = f"eval/{rate.source}", float(rate.num_reference)
        metrics[f"{name}/error_rate"] = Ratio(rate.greedy.value * units, units)
        metrics[f"{name}/insertions"] = Ratio(rate.insertions * units, units)
        metrics[f"{name}/deletions"] = Ratio(rate.deletions * units, units)
        metrics[f"{name}/substitutions"] = Ratio(rate.substitutions * units, units)
        metrics[f"{name}/truncation_rate"] = Ratio(rate.truncated * rate.num_utterances, rate.num_utterances)
        if rate.expected is not None:
            metrics[f"{name}/expected_error_rate"] = Ratio(rate.expected.value * units, units)
    return metrics
