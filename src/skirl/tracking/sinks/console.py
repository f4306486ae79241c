"""One INFO line a step: what a person watches, in a fixed order."""

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

__all__ = ["ConsoleSink", "highlights"]

logger = logging.getLogger(__name__)

_ERROR_RATE = re.compile(r"eval/(.+)/error_rate")


@dataclass(frozen=True, slots=True)
class _Shown:
    name: str
    text: Callable[[float], str]


_BEFORE = (
    _Shown("reward/mean", lambda value: f"reward {value:.3f}"),
    _Shown("sft/loss", lambda value: f"loss {value:.4f}"),
    *(_Shown(f"{command}/loss", lambda value: f"loss {value:.4f}") for command in ("rm", "prm", "dpo", "kd")),
    *(_Shown(f"{command}/accuracy", lambda value: f"right {value:.1%}") for command in ("rm", "prm", "dpo")),
    _Shown("sft/token_accuracy", lambda value: f"accuracy {value:.1%}"),
)
_AFTER = (
    _Shown("policy/kl_reference", lambda value: f"KL {value:.4f}"),
    _Shown("rollout/truncation_rate", lambda value: f"cut off {value:.0%}" if value else ""),
    _Shown("reward/failure_rate", lambda value: f"reward failed {value:.0%}" if value else ""),
    _Shown("optim/lr", lambda value: f"lr {value:.2g}"),
    _Shown("rollout/tokens_per_s", lambda value: f"{value:,.0f} tok/s"),
    _Shown("time/step_s", lambda value: f"{value:.1f} s"),
)


class ConsoleSink:
    """Logs "step 12/100 | reward 0.812 | CER noisy 12.3% | KL 0.0012 | ... | 1,840 tok/s | 21.4 s".

    Args:
        total_steps: the run's last step.
        error_name: what the run's error rate is called: CER, WER, MER.
    """

    def __init__(self, total_steps: int, error_name: str = "CER") -> None:
        self._total_steps = total_steps
        self._error_name = error_name

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One line; a metric that the step lacks is left out."""
        shown = [*_texts(_BEFORE, values), *_error_rates(values, self._error_name), *_texts(_AFTER, values)]
        logger.info("step %d/%d | %s", step, self._total_steps, " | ".join(shown))

    def close(self) -> None:
        """Nothing is held open."""


def highlights(values: Mapping[str, float], error_name: str) -> dict[str, str]:
    """What a progress bar shows, by what it replaces when it comes again: reward or loss, and each error rate."""
    texts = {shown.name: shown.text(values[shown.name]) for shown in _BEFORE if shown.name in values}
    return texts | dict(zip(_error_names(values), _error_rates(values, error_name), strict=True))


def _error_rates(values: Mapping[str, float], error_name: str) -> list[str]:
    """ "CER noisy 12.3%" for every source that was evaluated."""
    rates = ((_ERROR_RATE.fullmatch(name), values[name]) for name in _error_names(values))
    return [f"{error_name} {match[1]} {value:.1%}" for match, value in rates if match]


def _error_names(values: Mapping[str, float]) -> list[str]:
    return [name for name in values if _ERROR_RATE.fullmatch(name)]


def _texts(table: tuple[_Shown, ...], values: Mapping[str, float]) -> list[str]:
    texts = [shown.text(values[shown.name]) for shown in table if shown.name in values]
    return [text for text in texts if text]
