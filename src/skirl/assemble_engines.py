"""The driver's side of engines in other processes: what they are made from, and the commits that are probed.

recipe + prompts + checkpoint headers -> EngineSetup -> (runtime) engines;  commit -> probe -> metrics
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from skirl.config.models import LoRAConfig
from skirl.config.schema import Config, VLLMEngineConfig
from skirl.errors import ConfigError
from skirl.models.adapters import adapter_specs
from skirl.models.checkpoints import checkpoint_specs
from skirl.models.family import Family
from skirl.models.loading import ModelFiles
from skirl.models.roles import parameter_role
from skirl.probe import Probe, choose_prompt, sampled_by, scored_by
from skirl.protocols import GroupSampler, WeightCommit
from skirl.records import Group, Prompt, Ratio, Sampling, TensorSpec
from skirl.rollouts.engines.arguments import EngineSpec, check_arguments
from skirl.rollouts.router import Router
from skirl.runtime.workers import EngineSetup, Workers
from skirl.tracking.tracker import Tracker

__all__ = ["CommitBeforeSampling", "ProbedCommit", "engine_setup", "probed"]


def engine_setup(
    config: Config, files: ModelFiles, prompts: Sequence[Prompt], sampling: Sampling, *, from_checkpoint: bool
) -> EngineSetup | None:
    """What every engine of the run is made from; None where the policy samples itself.

    Args:
        prompts: all that may be sampled from, for the longest sequence.
        from_checkpoint: engines load their weights themselves (no trainer commits any).
    """
    engine = config.rollout.engine
    if not isinstance(engine, VLLMEngineConfig):
        return None
    check_arguments(config.rollout.vllm)
    lora = None if from_checkpoint else _sent_adapter(config, files.family)
    budget = max(sampling.max_new_tokens, config.evaluation.max_new_tokens or 0)
    longest = max(len(prompt.input_ids) for prompt in prompts)
    spec = EngineSpec(
        model_path=str(config.model.path),
        dtype=config.model.dtype,
        seed=config.run.seed,
        tensor_parallel_size=engine.tensor_parallel_size,
        arguments=config.rollout.vllm,
        enable_sleep=False,
        gpu_memory_utilization=engine.gpu_memory_utilization,
        max_model_len=longest + budget,
        placeholder=files.family.placeholder,
        max_in_flight=engine.max_in_flight,
        load_format="auto" if from_checkpoint else "dummy",
        adapter_rank=None if lora is None else lora.rank,
        adapter_targets=() if lora is None else lora.target_modules,
    )
    return EngineSetup(spec, expected_tensors(config, files.family), sleep_level=2)


def _sent_adapter(config: Config, family: Family) -> LoRAConfig | None:
    """The adapter that engines add themselves; None where weights are sent with it added in.

    Raises: ConfigError: vLLM adds none to this kind of model as trainers have it.
    """
    lora = config.model.lora
    if lora is None or lora.commit == "merged":
        return None
    has_experts = any(".experts." in name for name in checkpoint_specs(config.model.path))
    reasons = {
        f"this is an audio model ({family.name})": family.placeholder is not None,
        "this is a mixture of experts": has_experts,
    }
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        raise ConfigError(
            f"model.lora.commit = adapter: {found[0]}; adapters are sent apart to text models without experts only: "
            "set model.lora.commit to merged"
        )
    return lora


def expected_tensors(config: Config, family: Family) -> tuple[TensorSpec, ...]:
    """What a whole commit must bring, by the checkpoint's headers and the recipe: independent of what trainers hold."""
    model = config.model
    frozen = {*model.freeze, "language_model"} if model.lora is not None else set(model.freeze)

    def trains(name: str) -> bool:
        return parameter_role(name, family) not in frozen and name not in family.constant

    found = checkpoint_specs(model.path)
    specs = {name: TensorSpec(name, shape, model.dtype, trains(name)) for name, (shape, _) in found.items()}
    if model.lora is None:
        return tuple(specs.values())
    adapters = adapter_specs(specs, family, model.lora)
    if model.lora.commit == "adapter":
        return (*specs.values(), *(matrix for pair in adapters.values() for matrix in pair))
    return tuple(replace(spec, trained=spec.trained or name in adapters) for name, spec in specs.items())


def probed(
    config: Config,
    workers: Workers,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    placeholder_id: int | None,
    tracker: Tracker,
) -> WeightCommit:
    """The workers' commits, with the probe where engines are processes of their own and the recipe wants it."""
    if config.rollout.probe is None or not isinstance(config.rollout.engine, VLLMEngineConfig):
        return workers
    prompt = choose_prompt(prompts)
    limit = config.rollout.engine.request_timeout_s
    each = [Router([engine], None, config.run.seed, timeout_s=limit) for engine in workers.engines]
    probe = Probe(
        config.rollout.probe,
        dtype=config.model.dtype,
        sampling=sampling,
        sample=sampled_by([one.sample for one in each], prompt),
        score=scored_by(workers, prompt, placeholder_id),
        invalidate_caches=workers.invalidate_caches,
        commit_whole=workers.send_all_weights,
        event=tracker.event,
    )
    return ProbedCommit(workers, probe)


class ProbedCommit:
    """A weight commit that is followed by the probe where it is due."""

    def __init__(self, commits: WeightCommit, probe: Probe) -> None:
        self._commits, self._probe = commits, probe

    def commit(self, version: int) -> Mapping[str, Ratio]:
        """commit/* and, where it was due, probe/*."""
        return {**self._commits.commit(version), **self._probe.after_commit(version)}


class CommitBeforeSampling:
    """Commits only what is going to be sampled from: supervised training changes weights often and samples rarely."""

    def __init__(self, workers: Workers, sample: GroupSampler, *, held: int | None) -> None:
        """``held``: version that the engines hold already; None at the start of a run."""
        self._workers, self._sample, self._held = workers, sample, held
        self._newest = held or 0

    def commit(self, version: int) -> Mapping[str, Ratio]:
        """Notes the version."""
        self._newest = version
        return {}

    def sample(
        self,
        key: str,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        group_size: int,
        on_group: Callable[[Group], None],
    ) -> list[Group]:
        """Brings the newest weights to the engines, if they are not there, and samples."""
        if self._held != self._newest:
            self._workers.commit(self._newest)
            self._held = self._newest
        return self._sample(key, prompts, sampling, group_size, on_group)
