"""What a recipe means: its loss as a formula, and what runs where."""

from skirl.config.check import Command
from skirl.config.describe import plain
from skirl.config.method import ConstantNormalizer, GroupNorm, MethodConfig
from skirl.config.schema import (
    Config,
    DeepSpeedBackendConfig,
    PolicyEngineConfig,
    RayRuntimeConfig,
    RewardConfig,
    TrainConfig,
)

__all__ = ["loss_formula", "processes"]

_KL = {"k1": "d_it", "k2": "d_it^2 / 2", "k3": "exp(-d_it) - 1 + d_it"}


def loss_formula(config: Config) -> list[tuple[str, str]]:
    """The reinforcement-learning loss of an optimizer step, as (line, the setting it comes from)."""
    method = config.method
    in_loss = method.kl is not None and method.kl.where == "loss"
    terms = ["P_it"]
    if method.kl is not None and in_loss:
        terms.append(f"+ {plain(method.kl.coef)} K_it")
    if method.entropy_coef:
        terms.append(f"- {plain(method.entropy_coef)} H_it")
    total = terms[0] if len(terms) == 1 else f"({' '.join(terms)})"
    lines = [
        (f"L    = sum over responses i, tokens t of  w_it {total}", ""),
        _weights(method),
        *_policy_loss(method),
        ("r_it = pi(y_it) / pi_old(y_it)", ""),
    ]
    if method.kl is not None:
        lines.append(
            (f"K_it = {_KL[method.kl.estimator]},  d_it = log pi(y_it) - log pi_ref(y_it)", "method.kl.estimator")
        )
    if method.entropy_coef:
        lines.append(("H_it = entropy of pi at token t", "method.entropy_coef"))
    lines += [*_advantage(config), *_scores(config)]
    sampling = config.rollout.sampling
    cuts = [f"temperature {plain(sampling.temperature)}"]
    cuts += [f"top_p {plain(sampling.top_p)}"] if sampling.top_p < 1 else []
    cuts += [f"top_k {sampling.top_k}"] if sampling.top_k else []
    cuts += [f"min_p {plain(sampling.min_p)}"] if sampling.min_p else []
    lines.append((f"pi, pi_old, pi_ref: probabilities at {', '.join(cuts)}", "rollout.sampling"))
    return lines


def _weights(method: MethodConfig) -> tuple[str, str]:
    normalizer = method.normalizer
    if isinstance(normalizer, ConstantNormalizer):
        text = f"1 / (S {normalizer.length}),  S responses in the optimizer step"
    elif normalizer.kind == "token":
        text = "1 / (all action tokens of the optimizer step)"
    else:
        text = "1 / (S T_i),  S responses in the optimizer step, T_i action tokens"
    return f"w_it = {text}", "method.normalizer"


def _policy_loss(method: MethodConfig) -> list[tuple[str, str]]:
    clip = method.policy_loss
    low, high = f"{1 - clip.low:.6g}", f"{1 + clip.high:.6g}"
    lines = [(f"P_it = -min(r_it A_i, clip(r_it, {low}, {high}) A_i)", "method.policy_loss")]
    if clip.dual is not None:
        lines.append((f"       and where A_i < 0, at most -{plain(clip.dual)} A_i", "method.policy_loss.dual"))
    return lines


def _advantage(config: Config) -> list[tuple[str, str]]:
    advantage, size = config.method.advantage, config.rollout.group_size
    if isinstance(advantage, GroupNorm):
        divisor = "G" if advantage.ddof == 0 else "(G - 1)"
        text = f"(R_i - mean R) / (std R + {plain(advantage.eps)})"
        where = f"over the G = {size} responses to a prompt, variance with 1/{divisor}"
    else:
        text, where = "R_i - mean R", f"over the G = {size} responses to a prompt"
    exact = f"exactly 0 where max R - min R <= {plain(advantage.tolerance)} max(1, max |R|)"
    lines = [(f"A_i  = {text}", "method.advantage"), (f"       {where}", "rollout.group_size")]
    return [*lines, (f"       {exact}", "method.advantage.tolerance")]


def _scores(config: Config) -> list[tuple[str, str]]:
    reward, kl = config.reward, config.method.kl
    parts = ["score_i (no section reward in this recipe)"] if reward is None else _parts(reward)
    if kl is not None and kl.where == "reward":
        parts.append(f"- {plain(kl.coef)} (sum over t of K_it at pi_old)")
    text = " ".join(parts).replace("+ -", "- ")
    return [(f"R_i  = {text}", "reward" if kl is None or kl.where == "loss" else "reward, method.kl.where")]


def _parts(reward: RewardConfig) -> list[str]:
    parts: list[str] = []
    if reward.python is not None:
        parts.append(f"{reward.python.name}:{reward.function}")
        if reward.weights:
            factors = ", ".join(f"{name} x {plain(weight)}" for name, weight in reward.weights.items())
            parts[-1] += f" ({factors}, other parts x 1)"
    parts += [f"{plain(term.weight)} {name}" for name, term in reward.terms.items()]
    return [part if index == 0 else f"+ {part}" for index, part in enumerate(parts)]


# ------------------------------------------------------------------------------------------------------ what runs where
def processes(config: Config, command: Command) -> list[tuple[str, str]]:
    """(role, what and where) of everything that a command starts."""
    sampling = config.rollout.sampling
    same = "in the driver" if not isinstance(config.runtime, RayRuntimeConfig) else "in the policy's ranks"
    lines = [("driver", "1 process on this machine: loop, plan, ledger")]
    if isinstance(config.runtime, RayRuntimeConfig):
        lines.append(("runtime", _ray(config.runtime)))
    lines.append(("policy", _policy(config, command)))
    if command == "train":
        kl = config.method.kl
        reference = f"frozen copy of the policy, {same} (method.kl)" if kl else "none (method.kl is null)"
        lines.append(("reference", reference))
    if command != "sft" or config.data.eval:
        lines.append(("rollouts", f"{_sampler(config, same)}, {sampling.max_new_tokens} tokens each"))
    if command == "train" and config.reward is not None:
        reward = config.reward
        lines.append(("rewards", f"{_count(reward.num_workers, 'process')}, {plain(reward.timeout_s)} s a call"))
    return [*lines, *_amounts(config, command)]


def _sampler(config: Config, same: str) -> str:
    engine = config.rollout.engine
    if isinstance(engine, PolicyEngineConfig):
        return f"the policy's own forward pass, {same}: up to {engine.batch_size} responses a rank at once"
    size = engine.tensor_parallel_size
    parallel = f" of {size} GPUs" if size > 1 else ""
    fill = f"one for {'each GPU' if size == 1 else f'every {size} GPUs'} of its group (1 without GPUs)"
    count = fill if engine.engines is None else str(engine.engines)
    return f"vLLM engines{parallel}: {count}, up to {engine.max_in_flight} responses each at once"


def _ray(runtime: RayRuntimeConfig) -> str:
    gpus = {"auto": "1 GPU where the cluster has GPUs", "gpu": "1 GPU", "cpu": "no GPU"}[runtime.device]
    cluster = f"at {runtime.address}" if runtime.address else "started on this machine"
    return f"Ray, {cluster}; a place is {runtime.cpus_per_rank:g} CPU and {gpus}"


def _policy(config: Config, command: Command) -> str:
    trainer, runtime = config.trainer, config.runtime
    backend = "single"
    if isinstance(trainer.backend, DeepSpeedBackendConfig):
        offload = ", optimizer in host memory" if trainer.backend.offload_optimizer else ""
        backend = f"deepspeed ZeRO-{trainer.backend.zero_stage}{offload}"
    what = config.model.dtype if command == "eval" else f"{config.model.dtype}, {backend}"
    if not isinstance(runtime, RayRuntimeConfig):
        turns = ", one after another" if trainer.ranks > 1 else ""
        return f"{_count(trainer.ranks, 'rank')} in the driver{turns}: {what}"
    return f"{_count(trainer.ranks, 'rank')}: {what}"


def _amounts(config: Config, command: Command) -> list[tuple[str, str]]:
    if command == "train" and config.train is not None:
        return _train_amounts(config, config.train)
    if command == "sft" and config.sft is not None:
        sft = config.sft
        return [
            ("a step", f"{_count(sft.batch_size, 'row')}"),
            ("the run", f"{sft.steps} steps, {sft.steps * sft.batch_size} rows"),
        ]
    return []


def _train_amounts(config: Config, train: TrainConfig) -> list[tuple[str, str]]:
    size, method = config.rollout.group_size, config.method
    rollouts = train.prompts_per_step * size
    updates = method.epochs * method.mini_batches
    batch = f"{train.prompts_per_step} prompts x {size} responses = {rollouts} rollouts"
    step = f"{batch}, {_count(updates, 'optimizer step')}"
    run = f"{train.steps} steps, {train.steps * train.prompts_per_step} prompts, {train.steps * rollouts} rollouts"
    return [("a step", step), ("the run", run)]


def _count(number: int, noun: str) -> str:
    plural = noun + "es" if noun.endswith("s") else noun + "s"
    return f"{number} {noun if number == 1 else plural}"
