"""What scores outside the reward processes: HTTP services and local reward models, asked side by side."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace

from skirl.config.rewards import RewardConfig
from skirl.errors import ConfigError, RewardError
from skirl.protocols import RewardModels
from skirl.records import Ratio, RewardSample, ScoreFailure
from skirl.rewards.combine import Parts
from skirl.rewards.local_models import LocalModel
from skirl.rewards.services import Service, check_urls
from skirl.runtime.env import secret

__all__ = ["Sources", "with_scores"]


class Sources:
    """All services and models of a recipe. ``open``, ``score`` and ``close`` belong to one event loop."""

    def __init__(self, config: RewardConfig) -> None:
        """Reads the tokens; opens nothing.

        Raises:
            ConfigError: an address is none, or the variable with a token is not set.
        """
        self._config = config
        self._models: RewardModels | None = None
        self._tokens = {name: _token(name, service.token_env) for name, service in config.services.items()}
        check_urls(config.services)
        self._services: list[Service] = []
        self._told: dict[str, tuple[int, float]] = {}
        """Of each service: requests and their seconds at the last call of ``metrics``."""
        self._asked: dict[str, LocalModel] = {}

    def attach(self, models: RewardModels) -> None:
        """The models exist now; may be called from any thread before the first sample is scored."""
        self._models = models

    async def open(self) -> None:
        """Connects to the services. Raises ConfigError where no server of one answers."""
        self._services = [Service(name, each, self._tokens[name]) for name, each in self._config.services.items()]
        await asyncio.gather(*(service.check() for service in self._services))

    async def score(self, sample: RewardSample) -> Parts | ScoreFailure:
        """Parts of all, or the first failure. ``{}`` where there is no source.

        Raises:
            RewardError: the models were not attached. SkirlError: their workers are gone.
        """
        asked = [service.score(sample) for service in self._services]
        asked += [self._model(name).score(sample) for name in self._config.models]
        parts: Parts = {}
        for result in await asyncio.gather(*asked):
            if isinstance(result, ScoreFailure):
                return result
            parts |= result
        return parts

    def metrics(self) -> dict[str, Ratio]:
        """How the services do: the time of what they answered since the last call, retries, servers that rest. From
        any thread.
        """
        found: dict[str, Ratio] = {}
        for service in self._services:
            now = service.answered, service.seconds
            requests, seconds = self._told.get(service.name, (0, 0.0))
            self._told[service.name] = now
            if now[0] > requests:
                found[f"reward/request_s/{service.name}"] = Ratio(now[1] - seconds, now[0] - requests)
            found[f"reward/retries/{service.name}"] = Ratio(service.retries, 1)
            found[f"reward/resting/{service.name}"] = Ratio(service.resting, 1)
        return found

    async def close(self) -> None:
        """Ends requests and calls that are under way."""
        await asyncio.gather(*(one.close() for one in (*self._services, *self._asked.values())))

    def _model(self, name: str) -> LocalModel:
        if self._models is None:
            raise RewardError(
                f"reward.models.{name} is asked for a score before the models are loaded: call RewardPool.attach first"
            )
        if name not in self._asked:
            self._asked[name] = LocalModel(name, self._models)
        return self._asked[name]


def _token(service: str, variable: str | None) -> str | None:
    if variable is None:
        return None
    value = secret(variable)
    if not value:
        raise ConfigError(
            f"reward.services.{service}.token_env names the environment variable {variable}, which is not set here: "
            f"export {variable}=... before the run, or remove token_env."
        )
    if not (value.isascii() and value.isprintable() and " " not in value):  # else it would be shown by whoever sends it
        raise ConfigError(
            f"reward.services.{service}.token_env: the value of {variable} cannot be sent in a header; it must be one "
            "word of ASCII characters, without a line end."
        )
    return value


def with_scores(sample: RewardSample, parts: Parts) -> RewardSample:
    """The sample as the Python function sees it after the others: a part by turn is its sum, None is left out."""
    scores: Mapping[str, float] = {
        name: sum(value) if isinstance(value, tuple) else value for name, value in parts.items() if value is not None
    }
    return replace(sample, scores=scores)
