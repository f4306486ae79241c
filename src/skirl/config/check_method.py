"""Contradictions inside a method, and between it and what is sampled; see ``check``."""

from collections.abc import Iterator

from skirl.config.algorithms import ClipCov, DecoupledNorm, MeanRange, PassAtK, ShapingConfig
from skirl.config.combinations import legal
from skirl.config.recipe import Recipe

__all__ = ["method_problems", "method_warnings"]

ALONE = ("gae", "reinforce", "reinforce_pp")
"""Advantages that need no siblings."""


def method_problems(recipe: Recipe) -> Iterator[str]:
    """What keeps ``skirl train`` from running this method, one sentence each."""
    yield from _sampling(recipe)
    yield from _kl(recipe)
    yield from _parts(recipe)
    yield from _logged_parts(recipe)
    yield from _correction(recipe)
    yield from _mini_batches(recipe)
    yield from _critic(recipe)
    yield from _shaping(recipe)
    yield from _dynamic_sampling(recipe)


# ------------------------------------------------------------------------------------------------------------- problems
def _sampling(recipe: Recipe) -> Iterator[str]:
    rollout, advantage = recipe.config.rollout, recipe.config.method.advantage
    if rollout.sampling.temperature == 0:
        yield (
            f"{recipe.at('rollout.sampling.temperature')} is greedy: all responses to a prompt are equal and "
            "nothing is learned. Set it above 0 (1 is usual); evaluation is greedy in any case."
        )
    if advantage.kind not in ALONE and rollout.group_size == 1:
        yield (
            f"{recipe.at('method.advantage.kind')} compares the responses of a group, but "
            f"{recipe.at('rollout.group_size')} leaves nothing to compare: every advantage would be 0. "
            "Set rollout.group_size to 2 or more (8 is usual)."
        )
    elif isinstance(advantage, PassAtK) and advantage.k >= rollout.group_size:
        yield (
            f"{recipe.at('method.advantage.k')} is not below {recipe.at('rollout.group_size')}: a draw of k would be "
            "the whole group, which tells no response from another, so every advantage would be 0. Raise "
            "rollout.group_size, or lower k."
        )


def _kl(recipe: Recipe) -> Iterator[str]:
    method = recipe.config.method
    if method.kl is not None and method.kl.where == "loss" and method.kl.estimator == "k1":
        yield (
            f"{recipe.at('method.kl.estimator')} has no useful gradient with {recipe.at('method.kl.where')} (in "
            "expectation it is 0): set the estimator to k3 or k2, or method.kl.where to reward."
        )


def _parts(recipe: Recipe) -> Iterator[str]:
    """The table of ``combinations``, and bounds of single variants."""
    method = recipe.config.method
    kl = "none" if method.kl is None else method.kl.where
    reason = legal(method.policy_loss, method.advantage, method.normalizer, kl)
    if reason is not None:
        place = "" if kl == "none" else f", {recipe.at('method.kl.where')}"
        yield (
            f"{recipe.at('method.policy_loss.kind')}, {recipe.at('method.advantage.kind')}, "
            f"{recipe.at('method.normalizer.kind')}{place}: {reason} (docs/methods.md)."
        )
    if isinstance(method.policy_loss, ClipCov) and method.policy_loss.cov_low >= method.policy_loss.cov_high:
        yield (
            f"{recipe.at('method.policy_loss.cov_low')} is not below {recipe.at('method.policy_loss.cov_high')}, so "
            "that no token can be chosen: lower the one or raise the other."
        )


def _logged_parts(recipe: Recipe) -> Iterator[str]:
    advantage, reward = recipe.config.method.advantage, recipe.config.reward
    if not isinstance(advantage, DecoupledNorm) or advantage.weights or reward is None or reward.combine != "python":
        return
    logged = [name for sources in (reward.terms, reward.services, reward.models) for name in sources]
    if logged:
        yield (
            f"{recipe.at('method.advantage.kind')} reads every part of a score, also what "
            f"{recipe.at('reward.combine')} only logs ({', '.join(logged)}): set method.advantage.weights, with 0 for "
            "each part that must not count."
        )


def _correction(recipe: Recipe) -> Iterator[str]:
    method = recipe.config.method
    correction = method.correction
    if correction is None:
        return
    if method.old_policy == "rollout":
        yield (
            f"{recipe.at('method.correction.kind')} weighs the gap between the trainer's old policy and the engine, "
            f"but {recipe.at('method.old_policy')} takes the ratio against the engine itself: set method.correction "
            "to null, or method.old_policy to trainer."
        )
    if correction.kind != "sequence_is" and correction.low >= correction.high:
        yield (
            f"{recipe.at('method.correction.low')} is not below {recipe.at('method.correction.high')}: lower the one "
            "or raise the other."
        )


def _mini_batches(recipe: Recipe) -> Iterator[str]:
    train, method = recipe.config.train, recipe.config.method
    if train is not None and train.prompts_per_step % method.mini_batches:
        prompts, parts = train.prompts_per_step, method.mini_batches
        good = ", ".join(str(number) for number in range(1, prompts + 1) if prompts % number == 0)
        yield (
            f"{recipe.at('train.prompts_per_step')} cannot be dealt out evenly to "
            f"{recipe.at('method.mini_batches')}: set train.prompts_per_step to "
            f"{(prompts // parts + 1) * parts}, or method.mini_batches to one of {good}."
        )


def _critic(recipe: Recipe) -> Iterator[str]:
    config = recipe.config
    if config.critic is None:
        return
    if not config.method.needs_critic:
        yield (
            f"The section critic is not used: {recipe.at('method.advantage.kind')} has no critic. Remove the section, "
            "or set method.preset to ppo (method.advantage to gae)."
        )
    elif config.train is not None and config.critic.warmup_steps >= config.train.steps:
        yield (
            f"{recipe.at('critic.warmup_steps')} is not below {recipe.at('train.steps')}, so that the policy would "
            "never be trained: lower the one or raise the other."
        )


def _shaping(recipe: Recipe) -> Iterator[str]:
    config, shaping = recipe.config, recipe.config.method.shaping
    if isinstance(config.method.advantage, DecoupledNorm) and shaping != ShapingConfig():
        yield (
            f"{recipe.at('method.advantage.kind')} reads the parts of a score, and method.shaping changes only the "
            "total: make what it does a part of the reward, or remove method.shaping."
        )
    if shaping.clip_range is not None and shaping.clip_range[0] >= shaping.clip_range[1]:
        yield f"{recipe.at('method.shaping.clip_range')} is empty or upside down: write [low, high]."
    truncation = shaping.truncation
    if truncation is not None and (truncation.factor is None) == (truncation.score is None):
        what = "neither" if truncation.factor is None else "both"
        yield (
            f"method.shaping.truncation sets {what} of factor and score: set one of them, a factor in [0, 1] for the "
            "score of a cut-off response, or what it is worth."
        )
    budget = config.rollout.sampling.max_new_tokens
    if shaping.overlong is not None and round(shaping.overlong.buffer_share * budget) < 1:
        yield (
            f"{recipe.at('method.shaping.overlong.buffer_share')} of {recipe.at('rollout.sampling.max_new_tokens')} is "
            "less than a token: raise the share, or set method.shaping.overlong to null."
        )


def _dynamic_sampling(recipe: Recipe) -> Iterator[str]:
    config, dynamic = recipe.config, recipe.config.method.dynamic_sampling
    if dynamic is None:
        return
    path = "method.dynamic_sampling.keep"
    if not isinstance(dynamic.keep, MeanRange):
        if config.rollout.group_size == 1:
            yield (
                f"{recipe.at(f'{path}.kind')} keeps groups whose scores differ, but {recipe.at('rollout.group_size')} "
                "leaves none: raise the group's size, or set method.dynamic_sampling to null."
            )
        return
    if dynamic.keep.low >= dynamic.keep.high:
        yield (
            f"{recipe.at(f'{path}.low')} is not below {recipe.at(f'{path}.high')}, so that no group would be kept: "
            "lower the one or raise the other."
        )
    if config.method.shaping.clip_range is not None:
        yield (
            f"{recipe.at(f'{path}.kind')} judges raw scores, but {recipe.at('method.shaping.clip_range')} changes them "
            "afterwards: a group inside the range may have equal scores left, and one outside of it a spread. Clip in "
            "the reward itself, or set method.dynamic_sampling.keep to spread."
        )


# ------------------------------------------------------------------------------------------------------------- warnings
def method_warnings(recipe: Recipe) -> Iterator[str]:
    """Settings of a method that run, but probably not as meant."""
    config, method, train = recipe.config, recipe.config.method, recipe.config.train
    budget = config.rollout.sampling.max_new_tokens
    if method.normalizer.kind == "constant" and 1 < method.normalizer.length < budget:
        yield (
            f"{recipe.at('method.normalizer.length')} is smaller than "
            f"{recipe.at('rollout.sampling.max_new_tokens')}: a long response weighs more than 1."
        )
    if method.kl is not None and method.kl.where == "reward" and method.kl.estimator != "k1":
        yield (
            f"{recipe.at('method.kl.estimator')} with {recipe.at('method.kl.where')}: in the reward only k1 has the "
            "gradient of the KL divergence; k2 and k3 are meant for method.kl.where = loss."
        )
    if train is not None:
        rollouts = train.prompts_per_step * config.rollout.group_size // method.mini_batches
        if rollouts < config.trainer.ranks:
            yield f"An optimizer step has {rollouts} rollouts for {recipe.at('trainer.ranks')}: ranks will idle."
