"""Between scores and plan: scored groups become training sequences with every stream that the method needs.

scored groups -> reference and old log-probs, values -> shaped scores -> (KL off the reward) -> advantages, returns
-> corrections -> sequences -> plan -> (tokens of high covariance)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from skirl.config.method import MethodConfig
from skirl.errors import RewardError
from skirl.planning.schedule import make_plan, scoring_plan
from skirl.protocols import Trainer
from skirl.records import Doubles, Plan, Ratio, Role, ScoredGroup, TrainingSequence
from skirl.step.advantages import BY_TOKEN, Member, credits_of
from skirl.step.corrections import corrected, with_selection
from skirl.step.kl import KLController, kl_of_responses, kl_per_token
from skirl.step.sequences import rollout_sequence
from skirl.step.shaping import raw_scores, shaped_scores

__all__ = ["Batch", "Method"]

CONSTANT_CREDIT = ("gspo", "gmpo", "topr")
"""Losses of whole responses: their advantage must be the same for all tokens of one."""


@dataclass(frozen=True)
class Batch:
    """What a step trains on.

    Attributes:
        sequences: one a kept rollout. group_of: the group (prompt id) of each.
        kl: KL to the reference a response, None without one. kl_coef: its factor in this step.
        metrics: of shaping and corrections.
    """

    sequences: tuple[TrainingSequence, ...]
    group_of: tuple[str, ...]
    kl: Ratio | None = None
    kl_coef: float = 0.0
    metrics: Mapping[str, Ratio] = field(default_factory=dict[str, Ratio])


class Method:
    """The algorithm's host side: which models are asked, what each token earns, and which roles are trained.

    Args:
        config: the complete method.
        placeholder_id: token id of audio placeholders; None for text models.
        max_scoring_tokens: cap of a micro-batch in passes without gradient.
        seed: the run's; for choices among tokens.
        critic_warmup_steps: steps at the start in which the critic alone is trained.
    """

    def __init__(
        self,
        config: MethodConfig,
        *,
        placeholder_id: int | None,
        max_scoring_tokens: int,
        seed: int = 0,
        critic_warmup_steps: int = 0,
    ) -> None:
        self.config = config
        self._placeholder_id, self._max_scoring_tokens = placeholder_id, max_scoring_tokens
        self._seed, self._warmup = seed, critic_warmup_steps
        self._controller = KLController(config.kl)

    def roles(self, step: int) -> tuple[Role, ...]:
        """What step ``step`` (from 0) trains."""
        if not self.config.needs_critic:
            return ("policy",)
        return ("critic",) if step < self._warmup else ("policy", "critic")

    def prepare(self, kept: Sequence[ScoredGroup], trainer: Trainer) -> Batch:
        """Training sequences of groups in which every rollout has a score.

        Raises: RewardError: scores that this method cannot learn from; the message names sample and value.
        """
        pairs = [(g, r) for g in kept for r in g.group.rollouts]
        sequences = [rollout_sequence(g.group.prompt, r, self._placeholder_id) for g, r in pairs]
        sequences = self._with_streams(sequences, trainer)
        metrics: dict[str, Ratio] = {}
        if self.config.correction is not None:
            sequences, metrics = corrected(sequences, self.config.correction)
        members = self._members(kept, sequences)
        metrics |= self._shaping_metrics(members)
        found = credits_of(members, self.config.advantage)
        done = [replace(s, advantages=c.advantages, returns=c.returns) for s, c in zip(sequences, found, strict=True)]
        kl = None if self.config.kl is None else kl_of_responses(sequences)
        return Batch(tuple(done), tuple(g.group.prompt.id for g, _ in pairs), kl, self._controller.coef, metrics)

    def plan(self, batch: Batch, *, num_ranks: int, max_tokens: int) -> Plan:
        """The schedule of a batch under this method's normaliser."""
        normalizer, kl = self.config.normalizer, self.config.kl
        plan = make_plan(
            batch.sequences,
            num_ranks=num_ranks,
            max_tokens=max_tokens,
            normalizer=normalizer.kind,
            constant_length=normalizer.length if normalizer.kind == "constant" else None,
            mini_batches=self.config.mini_batches,
            group_of=batch.group_of,
            epochs=self.config.epochs,
            kl_coef=batch.kl_coef if kl is not None and kl.where == "loss" else 0.0,
        )
        return with_selection(plan, self.config.policy_loss, self._seed)

    def adapt(self, batch: Batch) -> None:
        """After the policy learned from a batch: moves what a controller moves."""
        if batch.kl is not None:
            self._controller.observe(batch.kl)

    def state(self) -> Mapping[str, Any]:
        """JSON-able, saved with each checkpoint."""
        return {"kl": self._controller.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues where ``state`` was taken."""
        self._controller.restore(state["kl"])

    # ---------------------------------------------------------------------------------------------------------- streams
    def _with_streams(self, sequences: list[TrainingSequence], trainer: Trainer) -> list[TrainingSequence]:
        """Reference and old log-probs and values, as far as the method has a use for them."""
        config = self.config
        plan = scoring_plan(sequences, num_ranks=trainer.num_ranks, max_tokens=self._max_scoring_tokens)
        if config.kl is not None:
            sequences = _with(sequences, "reference_logprobs", trainer.logprobs(plan, "reference"))
        if config.old_policy == "rollout":
            sequences = _with(sequences, "old_logprobs", [s.rollout_logprobs for s in sequences])
        elif config.needs_old_logprobs:
            sequences = _with(sequences, "old_logprobs", trainer.logprobs(plan, "policy"))
        if config.needs_critic:
            sequences = _with(sequences, "values", trainer.values(plan))
        return sequences

    # ----------------------------------------------------------------------------------------------------------- scores
    def _members(self, kept: Sequence[ScoredGroup], sequences: Sequence[TrainingSequence]) -> list[Member]:
        members: list[Member] = []
        rest = iter(sequences)
        for group in kept:
            mine = [next(rest) for _ in group.scores]
            self._refuse_turns(group)
            members.append(Member(group, mine, shaped_scores(group, self.config.shaping), self._penalties(mine)))
        return members

    def _penalties(self, sequences: Sequence[TrainingSequence]) -> list[Doubles]:
        kl = self.config.kl
        if kl is None or kl.where == "loss":
            return [np.zeros(s.num_actions) for s in sequences]
        return [self._controller.coef * kl_per_token(s, kl.estimator) for s in sequences]

    def _refuse_turns(self, group: ScoredGroup) -> None:
        loss, how = self.config.policy_loss, self.config.advantage
        whole = loss.kind in CONSTANT_CREDIT and not (loss.kind == "gspo" and loss.token_level)
        if how.kind in BY_TOKEN and whole and any(s.turns for s in group.scores):
            raise RewardError(
                f"group {group.group.prompt.id} has a reward for each turn, but method.policy_loss {loss.kind} is a "
                "loss of whole responses, whose tokens all earn the same: return the sum of the turns, or take a loss "
                "of tokens (ppo_clip, gspo with token_level)."
            )

    def _shaping_metrics(self, members: Sequence[Member]) -> dict[str, Ratio]:
        if self.config.shaping == type(self.config.shaping)():
            return {}
        change = sum(float((m.scores - raw_scores(m.group)).sum()) for m in members)
        return {"reward/shaping": Ratio(change, sum(len(m.scores) for m in members))}


def _with(sequences: Sequence[TrainingSequence], stream: str, values: Sequence[Any]) -> list[TrainingSequence]:
    return [replace(s, **{stream: found}) for s, found in zip(sequences, values, strict=True)]
