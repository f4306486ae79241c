"""Tiny policies and what tests feed them: checkpoints, prompts, sequences, plans cut by hand."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from skirl.assemble_worker import build_worker
from skirl.config.schema import Config, DataConfig, ModelConfig, OptimConfig, RunConfig, TrainerConfig
from skirl.models.attention import PACKED_ATTENTION, register_packed_attention
from skirl.models.clips import ClipStore
from skirl.models.loading import LoadedModel, load_model, set_trainable
from skirl.models.policy import Policy
from skirl.planning.schedule import make_plan
from skirl.prompts.decode import load_clip, padded_num_samples
from skirl.records import Media, MicroBatch, OptimizerStep, Plan, Prompt, Request, Row, Sampling, TrainingSequence
from skirl.rollouts.render import Renderer
from skirl.rollouts.router import request_seed
from skirl.runtime.local import LocalWorkers
from skirl.runtime.worker import WorkerSpec
from skirl.testing import tiny_models
from skirl.training.objective import Objective, SupervisedObjective

AUDIO = Path(__file__).parent / "data/librivox"

BUILDERS: dict[str, Callable[[Path], Path]] = {
    "tied": partial(tiny_models.tiny_qwen3, hidden=32),
    "untied": partial(tiny_models.tiny_qwen3, hidden=32, tied=False),
    "small": partial(tiny_models.tiny_qwen3, hidden=16, layers=1),
    "windowed": partial(tiny_models.tiny_qwen3, hidden=32),
    "moe": partial(tiny_models.tiny_qwen3_moe, hidden=32),
    "native": partial(tiny_models.tiny_qwen3_asr, hidden=32),
    "original": partial(tiny_models.tiny_qwen3_asr, hidden=32, original_layout=True),
    "qwen2_audio": partial(tiny_models.tiny_qwen2_audio, window_seconds=4),
    "glmasr": partial(tiny_models.tiny_glm_asr, window_seconds=4),
    "voxtral": partial(tiny_models.tiny_voxtral, window_seconds=4),
    "audioflamingo3": partial(tiny_models.tiny_audio_flamingo_3, window_seconds=4),
}
WINDOW = 4
"""Tokens of the sliding window of "windowed", whose second layer has one."""


class Checkpoints:
    """Directories by name, built when first asked for."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __getitem__(self, name: str) -> Path:
        directory = self._root / name
        if not directory.exists():
            BUILDERS[name](directory)
            sharpen(directory)
            if name == "windowed":
                file = directory / "config.json"
                layers = {"layer_types": ["full_attention", "sliding_attention"]}
                config = json.loads(file.read_text()) | layers | {"use_sliding_window": True, "sliding_window": WINDOW}
                file.write_text(json.dumps(config))
        return directory


def sharpen(directory: Path) -> None:
    """Scales a fresh checkpoint so that its predictions depend on the context and are far from uniform.

    Freshly initialised, log-probs all lie near -log V whatever the attention does, and would hide its mistakes.
    """
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if "embed" in name or "lm_head" in name:
            continue
        if tensor.ndim >= 2:
            tensors[name] = tensor * 10
        elif name.endswith("norm.weight") and "layers" not in name:
            tensors[name] = tensor * 12
    save_file({name: t.contiguous() for name, t in tensors.items()}, file, metadata={"format": "pt"})


# ------------------------------------------------------------------------------------------------------------- policies
@dataclass(frozen=True)
class Kit:
    """A policy with what makes prompts for it."""

    policy: Policy
    loaded: LoadedModel
    clips: ClipStore | None
    renderer: Renderer
    placeholder_id: int | None
    stop_ids: tuple[int, ...]
    banned_ids: tuple[int, ...]

    @property
    def is_audio(self) -> bool:
        return self.placeholder_id is not None

    def prompts(self, count: int) -> list[Prompt]:
        """Prompts of different lengths."""
        return [speech_prompt(self, i) if self.is_audio else text_prompt(self, i) for i in range(count)]

    def sampling(self, **settings: Any) -> Sampling:
        return Sampling(stop_ids=self.stop_ids, banned_ids=self.banned_ids, **settings)


def make_kit(
    directory: Path,
    *,
    freeze: Sequence[str] = ("encoder",),
    dtype: Literal["float32", "bfloat16"] = "float32",
    max_bytes: int = 1 << 30,
    forced: bool = False,
) -> Kit:
    """Loads a policy as ``assemble`` does."""
    register_packed_attention()
    is_audio = (
        "qwen3_asr" in (directory / "config.json").read_text()
        or "audio_config" in (directory / "config.json").read_text()
    )
    parts = {"": "sdpa", "text_config": PACKED_ATTENTION, "audio_config": "sdpa"}
    loaded = load_model(directory, dtype=dtype, attn_implementation=parts if is_audio else PACKED_ATTENTION)
    set_trainable(loaded.model, loaded.family, freeze)
    ids = loaded.tokenizer.convert_tokens_to_ids
    clips = None
    if is_audio:
        clips = ClipStore(
            loaded.model,
            loaded.family,
            loaded.processor,
            load=load_clip,
            encoder_frozen="encoder" in freeze,
            max_bytes=max_bytes,
        )
    return Kit(
        policy=Policy(loaded, clips),
        loaded=loaded,
        clips=clips,
        renderer=renderer_of(loaded, forced=forced),
        placeholder_id=ids(loaded.family.placeholder) if is_audio else None,
        stop_ids=(ids(loaded.family.end) if loaded.family.end else loaded.tokenizer.eos_token_id,),
        banned_ids=tuple(sorted(ids(list(loaded.family.banned)))),
    )


def renderer_of(loaded: Any, *, forced: bool = False) -> Renderer:
    return Renderer(loaded.family, loaded.tokenizer, loaded.config, forced=forced, num_samples=padded_num_samples)


def make_workers(
    directory: Path,
    objective: Objective | None = None,
    *,
    num_ranks: int = 1,
    with_reference: bool = True,
    optim: OptimConfig | None = None,
    **model: Any,
) -> LocalWorkers:
    """Local workers of a recipe that names this checkpoint."""
    config = Config(
        model=ModelConfig(path=directory, **model),
        data=DataConfig(),
        run=RunConfig(dir=directory / "run"),
        trainer=TrainerConfig(ranks=num_ranks, optim=optim or OptimConfig(lr=1e-3)),
    )
    spec = WorkerSpec(config, objective or SupervisedObjective(), 100, with_reference=with_reference)
    return LocalWorkers(build_worker(spec), num_ranks=num_ranks, batch_size=8)


# ----------------------------------------------------------------------------------------------------- prompts and rows
def clip(number: int, seconds: float) -> Media:
    """A piece of real speech, up to 3 s long; equal arguments are equal clips."""
    files = sorted(AUDIO.glob("*.wav"))
    return Media(str(files[number % len(files)]), 0.5 * (number // len(files)), seconds)


def speech_row(number: int, **changes: Any) -> Row:
    seconds = 0.4 + 0.35 * (number % 8)
    row = Row(
        id=f"clip{number}",
        source="made",
        media=(clip(number, seconds),),
        seconds=seconds,
        text=f"number {number}",
        language=("English", "Chinese")[number % 2],
        where=f"made.jsonl:{number}",
    )
    return replace(row, **changes)


def speech_prompt(kit: Kit, number: int) -> Prompt:
    return kit.renderer.prompt(speech_row(number))


def text_prompt(kit: Kit, number: int) -> Prompt:
    content = "the quick brown fox"[: 3 + 2 * number] + str(number)
    row = Row(id=f"text{number}", source="made", messages=({"role": "user", "content": content},), text=f"ok {number}")
    return kit.renderer.prompt(row)


def requests(prompts: Sequence[Prompt], sampling: Sampling, *, group_size: int = 1, key: str = "test") -> list[Request]:
    """Keyed as the router does."""
    return [Request(p, i, request_seed(0, key, p.id, i), sampling) for p in prompts for i in range(group_size)]


# ---------------------------------------------------------------------------------------------------------------- plans
def sequences(kit: Kit, lengths: Sequence[int], *, seed: int = 0, streams: bool = True) -> list[TrainingSequence]:
    """One sequence a length: a prompt of the kit and a random response of so many action tokens.

    Args: streams: with advantages and log-probs; old and reference ones differ a little from one another.
    """
    random = np.random.default_rng(seed)
    allowed = np.setdiff1d(np.arange(256), kit.banned_ids)
    made = []
    for number, (prompt, length) in enumerate(zip(kit.prompts(len(lengths)), lengths, strict=True)):
        start = len(prompt.input_ids)
        old = (-5 + random.standard_normal(length)).astype(np.float32)
        sequence = TrainingSequence(
            id=f"{prompt.id}#{number}",
            input_ids=np.concatenate([prompt.input_ids, random.choice(allowed, length)]).astype(np.int64),
            action_positions=np.arange(start, start + length),
            media=prompt.media,
            media_spans=spans(prompt, kit.placeholder_id),
        )
        if streams:
            sequence = replace(
                sequence,
                advantages=np.full(length, random.standard_normal()),
                old_logprobs=old,
                rollout_logprobs=old + np.float32(0.01),
                reference_logprobs=(old + 0.2 * random.standard_normal(length)).astype(np.float32),
            )
        made.append(sequence)
    return made


def spans(prompt: Prompt, placeholder_id: int | None) -> tuple[tuple[int, int], ...]:
    """The one run of placeholders of a prompt, found by counting."""
    count = prompt.input_ids.count(placeholder_id) if placeholder_id is not None else 0
    return ((prompt.input_ids.index(placeholder_id), count),) if count else ()


def whole(made: Sequence[TrainingSequence], normalizer: Any = "token", **settings: Any) -> Plan:
    """Everything in one micro-batch of one rank."""
    length = 7 if normalizer == "constant" else None
    return make_plan(made, num_ranks=1, max_tokens=10**6, normalizer=normalizer, constant_length=length, **settings)


def cut(plan: Plan, ranks: Sequence[Sequence[Sequence[int]]]) -> Plan:
    """The same batch and weights as one optimizer step with these micro-batches: ``ranks[r][m]`` lists sequences."""
    step = OptimizerStep(tuple(tuple(MicroBatch(tuple(m)) for m in rank) for rank in ranks))
    return replace(plan, steps=(step,))


def alone(plan: Plan) -> Plan:
    """Each sequence in a row of its own."""
    return cut(plan, [[[i] for i in range(len(plan.sequences))]])


# --------------------------------------------------------------------------------------------------- plain transformers
def plain_model(directory: Path, attn: str = "eager") -> LoadedModel:
    """The same checkpoint with transformers' own attention."""
    return load_model(directory, dtype="float32", attn_implementation=attn)


def plain_inputs(loaded: LoadedModel, ids: Sequence[int], media: Sequence[Media]) -> dict[str, torch.Tensor]:
    """Arguments of the model's own forward and generate for one unpadded sequence (Qwen3-ASR or text)."""
    tensor = torch.tensor([list(ids)])
    inputs = {"input_ids": tensor, "attention_mask": torch.ones_like(tensor)}
    for one in media:
        features = loaded.family.features(loaded.processor, load_clip(one, loaded.family.min_samples))
        inputs |= {name: value[None] for name, value in features.items()}
    return inputs


def plain_logits(loaded: LoadedModel, sequence: TrainingSequence) -> torch.Tensor:
    """[T, V] logits by the model's own forward that predict the action tokens of one unpadded sequence."""
    inputs = plain_inputs(loaded, sequence.input_ids.tolist(), sequence.media)
    logits = loaded.model(**inputs, use_cache=False).logits[0]
    return logits[torch.from_numpy(sequence.action_positions - 1)]


def plain_logprobs(loaded: LoadedModel, sequence: TrainingSequence) -> torch.Tensor:
    """[T] log-probs of the action tokens, temperature 1."""
    targets = torch.from_numpy(sequence.input_ids[sequence.action_positions])
    return plain_logits(loaded, sequence).log_softmax(-1).gather(-1, targets[:, None])[:, 0]


# ------------------------------------------------------------------------------------------------------------ gradients
Gradients = Mapping[str, torch.Tensor]


class GradientTap:
    """Sums every gradient that reaches the parameters meanwhile, whatever a backend does with them afterwards."""

    def __init__(self, policy: Policy) -> None:
        self.sums: dict[str, torch.Tensor] = {}
        self._named = [(name, p) for name, p in policy.named_parameters() if p.requires_grad]

    def __enter__(self) -> "GradientTap":
        def note(gradient: torch.Tensor, name: str) -> None:
            self.sums[name] = self.sums.get(name, 0.0) + gradient.detach().clone()

        self._hooks = [p.register_hook(partial(note, name=name)) for name, p in self._named]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()


def relative_difference(one: Gradients, other: Gradients) -> float:
    """Largest over tensors of |a - b| / |a|, and |a - b| / |a| of all together."""
    assert one.keys() == other.keys()
    ratios = [float((one[n] - other[n]).norm() / one[n].norm().clamp(min=1e-12)) for n in one]
    return max(ratios)
