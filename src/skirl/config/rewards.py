"""Where scores come from: a Python file, rule terms, HTTP services, local reward models."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from skirl.config.base import Frozen, by_name

__all__ = ["RewardConfig", "RewardModelConfig", "ServiceConfig", "Unit"]

Unit = Literal["auto", "char", "word", "mixed"]


class AccuracyTerm(Frozen):
    """1 - min(edits / reference units, clip): 1 is perfect, 1 - clip is the worst."""

    kind: Literal["accuracy"]
    """Which term."""
    weight: float = 1.0
    """Factor in the sum."""
    unit: Unit = "auto"
    """char is CER, word is WER, mixed is MER; auto goes by the row's language."""
    clip: Annotated[float, Field(gt=0)] = 2.0
    """Error rates are cut here. 2 rather than 1 keeps the difference between bad and worse."""


class KeywordsTerm(Frozen):
    """Mean of precision and recall over the row's keywords; absent where neither side has one."""

    kind: Literal["keywords"]
    """Which term."""
    weight: float = 0.3
    """Factor in the sum."""


class LanguageTerm(Frozen):
    """1 if the tag that the policy wrote is the row's language, else 0, times the share of text in its script."""

    kind: Literal["language"]
    """Which term."""
    weight: float = 0.1
    """Factor in the sum."""


class RepetitionTerm(Frozen):
    """-1 where the response repeats itself more than the reference does, else 0 (smoothness)."""

    kind: Literal["repetition"]
    """Which term."""
    weight: float = 1.0
    """Factor in the sum."""
    max_repeats: Annotated[int, Field(ge=2)] = 4
    """A run of one n-gram (n up to 20 units) longer than this, and than the reference's, is a repetition."""


class LengthTerm(Frozen):
    """-1 where the transcript holds more units a second than can be spoken, else 0."""

    kind: Literal["length"]
    """Which term."""
    weight: float = 0.5
    """Factor in the sum."""


class TruncationTerm(Frozen):
    """-1 where the budget ended the response, else 0."""

    kind: Literal["truncation"]
    """Which term."""
    weight: float = 0.5
    """Factor in the sum."""


class MathTerm(Frozen):
    """1 where the response's final answer equals the reference mathematically, else 0 (math-verify)."""

    kind: Literal["math"]
    """Which term."""
    weight: float = 1.0
    """Factor in the sum."""


class CodeTerm(Frozen):
    """Share of the row's tests that the code in the response passes, run in a process with limits."""

    kind: Literal["code"]
    """Which term."""
    weight: float = 1.0
    """Factor in the sum."""
    tests_column: str = "tests"
    """Column of the row with the tests: a list of {"stdin", "stdout"}, or of Python assertions."""
    timeout_s: Annotated[float, Field(gt=0)] = 5.0
    """Wall time of one test, seconds; the process and its children are killed then. All tests of a response together
    have 0.8 of ``reward.timeout_s``; those that are not reached count as not passed."""
    memory_mb: Annotated[int, Field(ge=64)] = 512
    """Address space of each process, MiB."""
    all_or_nothing: bool = False
    """1 only where every test passes, else 0."""


Term = Annotated[
    AccuracyTerm | KeywordsTerm | LanguageTerm | RepetitionTerm | LengthTerm | TruncationTerm | MathTerm | CodeTerm,
    Field(discriminator="kind"),
]


class ServiceConfig(Frozen):
    """HTTP reward services of one kind: POST {"samples": [...]} -> {"scores": [...]} (docs/rewards.md)."""

    urls: Annotated[tuple[str, ...], Field(min_length=1)]
    """Addresses that requests are posted to, of equal servers; each goes to the healthy one with the fewest in flight.
    One that fails rests, and comes back when it answers GET /health."""
    weight: float = 1.0
    """Factor in the sum."""
    token_env: str | None = None
    """Environment variable of the driver that holds the bearer token; the token itself is never written down."""
    batch_size: Annotated[int, Field(ge=1)] = 16
    """Samples a request at most."""
    max_in_flight: Annotated[int, Field(ge=1)] = 8
    """Requests to one service at once; the rest wait."""
    timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Deadline of one request, and the longest wait while no server is healthy, seconds."""
    retries: Annotated[int, Field(ge=0)] = 3
    """Further tries of a sample, each in a request of its own, on another server where there is one."""


class RewardModelConfig(Frozen):
    """A local reward model: a checkpoint with a scalar head (...ForSequenceClassification, or one of ``skirl prm``).

    It reads the prompt's chat turns and the response's text through its own tokenizer and chat template.
    """

    path: Path
    """Checkpoint directory."""
    weight: float = 1.0
    """Factor in the sum."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights; scores are float32 in any case."""
    standardize: bool = True
    """Subtract the mean and divide by the standard deviation that the checkpoint stores, where it stores them."""
    max_tokens_per_batch: Annotated[int, Field(ge=1)] = 16384
    """Tokens of prompt and response scored at once; a longer one alone is a failure of that sample."""


class RewardConfig(Frozen):
    """Where scores come from. A rollout's score is the weighted sum of its parts."""

    python: Path | None = None
    """A Python file with a reward function: ``reward(sample)``, ``reward(samples)`` (a whole group) or
    ``reward(batch)`` (the groups that wait when a process is free, up to 32); plain or async."""
    function: str = "reward"
    """Name of the function in the file."""
    weights: dict[str, float] = {}
    """Factor of each part that the Python function names; 1 where not given."""
    terms: dict[str, Annotated[Term, BeforeValidator(by_name)]] = {}
    """Terms of the rule library, by the name under which they are logged."""
    services: dict[str, ServiceConfig] = {}
    """HTTP services, by the name under which their scores are logged; a named part of one is logged as NAME/PART."""
    models: dict[str, RewardModelConfig] = {}
    """Local reward models, by the name under which their scores are logged. The Python function sees what they and the
    services gave as ``sample.scores``, so that it can combine them."""
    combine: Literal["sum", "python"] = "sum"
    """sum: weighted sum of all parts. python: the function's own parts alone count, the rest is logged."""
    num_workers: Annotated[int, Field(ge=1)] = 2
    """Processes that run rewards."""
    concurrency: Annotated[int, Field(ge=1)] = 16
    """Calls of an async function in flight in one process."""
    memory_mb: Annotated[int, Field(ge=64)] | None = None
    """Address space of a process that runs rewards, MiB (beyond it allocations fail); null sets no limit."""
    timeout_s: Annotated[float, Field(gt=0)] = 30.0
    """Deadline of one call; the process is killed then, seconds."""
    retries: Annotated[int, Field(ge=0)] = 0
    """Further tries of a failed call."""
    on_failure: Literal["drop_sample", "drop_group", "stop"] = "drop_sample"
    """What a sample without a score does to its group."""
    max_failure_rate: Annotated[float, Field(ge=0, le=1)] = 0.1
    """The run stops, with the reason, when a step's share of failed samples is above this."""

    @model_validator(mode="after")
    def _has_a_source(self) -> Self:
        if self.python is None and not (self.terms or self.services or self.models):
            raise ValueError(
                "has no source of scores: set reward.python, reward.terms, reward.services or reward.models"
            )
        if self.combine == "python" and self.python is None:
            raise ValueError("combine is python, but reward.python is not set: set it, or combine to sum")
        return self
