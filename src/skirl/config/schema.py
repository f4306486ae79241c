"""The one source of truth for recipes: every setting, its type, bound, default and meaning.

YAML recipes, dotted flags, ``--help`` and docs/config.md all derive from the classes below. Nothing here imports torch.
A choice is a union told apart by ``kind``; a variant that needs nothing else may be given by name (``runtime: ray``).
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from skirl.config.base import Frozen, by_name
from skirl.config.method import MethodConfig
from skirl.config.models import ModelConfig
from skirl.config.offline import DPOConfig, KDConfig, PRMConfig, RMConfig, SampleConfig, SFTConfig
from skirl.config.rewards import RewardConfig, Unit

__all__ = ["Config"]


# ----------------------------------------------------------------------------------------------------------------- data
ManifestFormat = Literal["auto", "qwen3_asr", "nemo", "kaldi", "wenet", "ms_swift", "audiofolder", "parquet", "text"]


class SourceConfig(Frozen):
    """One data source: a manifest of audio clips, or of text prompts."""

    path: Path
    """Manifest file or directory. Relative clip paths inside are relative to it."""
    format: ManifestFormat = "auto"
    """Form of the manifest; auto looks at the name and the first row and says what it found."""
    audio_key: str | None = None
    """Column that holds the clip, where it has an unusual name."""
    text_key: str | None = None
    """Column that holds the reference, where it has an unusual name."""
    language: str | None = None
    """Language of rows that name none: a code (zh) or a full English name (Chinese)."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Use only the first rows."""
    allow_pipes: bool = False
    """Run shell pipes of a Kaldi wav.scp. Off: a pipe is an error. Only for manifests you trust."""


class DataConfig(Frozen):
    """Training and evaluation data."""

    train: dict[str, SourceConfig] = {}
    """Training sources by name; they are concatenated and shuffled with the run's seed."""
    eval: dict[str, SourceConfig] = {}
    """Held-out sources by name; each is scored apart."""
    prompt: Literal["tagged", "forced"] = "tagged"
    """tagged: the policy writes the language tag itself. forced: the row's language stands in the prompt."""
    min_seconds: Annotated[float, Field(ge=0)] = 0.1
    """Shorter clips are invalid rows."""
    max_seconds: Annotated[float, Field(gt=0, le=1200)] = 30.0
    """Longer clips are invalid rows."""
    on_invalid: Literal["stop", "drop"] = "stop"
    """What invalid rows do: stop before training with the whole report, or be dropped and counted."""


# ------------------------------------------------------------------------------------------------------------- rollouts
class SamplingConfig(Frozen):
    """The distribution that responses are sampled from, and that the trainer scores under."""

    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    """Divides the logits; 0 is greedy, of use in evaluation only."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Keep the smallest set of tokens whose probability reaches this."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Drop tokens less likely than this share of the likeliest."""
    max_new_tokens: Annotated[int, Field(ge=1)] = 256
    """Budget of a response, tokens."""


class PolicyEngineConfig(Frozen):
    """Sampling by the policy's own forward pass, in the training processes."""

    kind: Literal["policy"] = "policy"
    """Which engine."""
    batch_size: Annotated[int, Field(ge=1)] = 128
    """Responses sampled at once by each rank; whole groups share their prompt's pass."""


class VLLMEngineConfig(Frozen):
    """Sampling by vLLM engines, each a Ray actor."""

    kind: Literal["vllm"]
    """Which engine."""
    engines: Annotated[int, Field(ge=1)] | None = None
    """How many; null fills the GPUs of the group that rollout is in (on machines without GPUs: one)."""
    tensor_parallel_size: Annotated[int, Field(ge=1)] = 1
    """GPUs of one engine; engines x this = GPUs of the group."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of each GPU's memory that an engine may use; null is 0.85 on GPUs of its own, and on shared ones what the
    trainer leaves (skirl show-placement prints it)."""
    sleep_level: Literal["auto", 1, 2] = "auto"
    """What an engine on shared GPUs does while the trainer works: 1 moves its weights to the host, 2 drops them, so
    that the next commit sends all; auto takes whichever moves fewer bytes. Without meaning on GPUs of its own."""
    max_in_flight: Annotated[int, Field(ge=1)] = 1024
    """Responses handed to one engine at once; the rest wait in the router."""
    request_timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """Deadline of one group from its hand-over, seconds."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """How long an engine may take to come up, seconds."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """Engines that may die and be replaced in a run before it stops."""


RolloutEngineConfig = Annotated[PolicyEngineConfig | VLLMEngineConfig, Field(discriminator="kind")]


class CommitConfig(Frozen):
    """How new weights reach engines in other processes."""

    transport: Literal["auto", "shared_memory", "cuda_ipc", "nccl", "gloo"] = "auto"
    """auto goes by the placement: cuda_ipc on shared GPUs, nccl between GPUs, shared_memory on the CPUs of one machine,
    gloo between machines without GPUs."""
    bucket_mb: Annotated[int, Field(ge=1)] = 512
    """Size of a message, MiB; two of them are held. A larger tensor gets a message of its own size."""
    checksum: bool = True
    """Compare a checksum of each message on both sides."""
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Deadline of a whole commit, seconds."""


class ProbeConfig(Frozen):
    """A prompt that engine and trainer both score: the proof that the weights arrived and mean the same."""

    every: Annotated[int, Field(ge=1)] = 10
    """After the first commit and then after every so many."""
    num_tokens: Annotated[int, Field(ge=1)] = 32
    """Response tokens compared."""
    tolerance: Annotated[float, Field(gt=0)] | None = None
    """Largest difference of a log-prob that passes without an alarm; null is 1e-3 in float32, 0.5 in bfloat16."""


class RolloutConfig(Frozen):
    """How responses are sampled."""

    engine: Annotated[RolloutEngineConfig, BeforeValidator(by_name)] = PolicyEngineConfig()
    """What samples."""
    vllm: dict[str, Any] = {}
    """Arguments of vLLM's engine under its own names (max_num_seqs, max_num_batched_tokens, enforce_eager, ...). They
    are checked against the installed version; what skirl must set itself is refused."""
    commit: CommitConfig = CommitConfig()
    """How new weights reach the engines."""
    probe: ProbeConfig | None = ProbeConfig()
    """Comparison of engine and trainer; null makes none. The policy's own engine needs none."""
    group_size: Annotated[int, Field(ge=1)] = 8
    """Responses a prompt."""
    sampling: SamplingConfig = SamplingConfig()
    """Distribution of the responses."""


# ------------------------------------------------------------------------------------------------------------- training
class ScheduleConfig(Frozen):
    """Learning rate as a function of consumed prompts (supervised rows, for sft)."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up; linear and cosine end at the run's last prompt."""
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the run's prompts over which the rate rises from 0."""
    final: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the peak rate left at the end of linear and cosine."""


class MuonConfig(Frozen):
    """Muon for the hidden matrices (Jordan et al. 2024, kellerjordan.github.io/posts/muon; arXiv:2502.16982)."""

    lr: Annotated[float, Field(gt=0)] = 2e-5
    """Peak learning rate of the matrices; follows the schedule of the rest."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the momentum; Nesterov."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""
    steps: Annotated[int, Field(ge=1)] = 5
    """Newton-Schulz steps."""


class EMAConfig(Frozen):
    """Exponential moving average of the trained weights, in float32; saved and exported beside the weights."""

    decay: Annotated[float, Field(gt=0, lt=1)] = 0.992
    """Of one optimizer step."""


class OptimConfig(Frozen):
    """AdamW (arXiv:1711.05101)."""

    lr: Annotated[float, Field(gt=0)] = 1e-6
    """Peak learning rate."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """Decay rates of the two moments."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the denominator."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay, on matrices only."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Gradients are scaled down to this norm; null never scales."""
    schedule: Annotated[ScheduleConfig, BeforeValidator(by_name)] = ScheduleConfig()
    """Learning rate over the run."""
    muon: MuonConfig | None = None
    """Step matrices of the hidden layers by Muon and the rest (embeddings, head, vectors) by AdamW; null: AdamW."""


class OffloadConfig(Frozen):
    """What the trainer gives back on shared GPUs while engines sample."""

    optimizer: bool = True
    """Move optimizer state and master weights to the host."""
    gradients: bool = True
    """Free the gradient buffers."""


class SingleBackendConfig(Frozen):
    """Plain PyTorch in one process; runs a plan for several ranks one rank after another."""

    kind: Literal["single"]
    """Which backend."""


class DeepSpeedBackendConfig(Frozen):
    """DeepSpeed ZeRO, one process a rank."""

    kind: Literal["deepspeed"]
    """Which backend."""
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 2
    """What is sharded over ranks: 0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters."""
    offload_optimizer: bool = False
    """Keep the optimizer's state in host memory."""


Backend = Annotated[SingleBackendConfig | DeepSpeedBackendConfig, Field(discriminator="kind")]


class TrainerConfig(Frozen):
    """How the policy is trained."""

    backend: Annotated[Backend, BeforeValidator(by_name)] = SingleBackendConfig(kind="single")
    """What runs the optimizer."""
    ranks: Annotated[int, Field(ge=1)] = 1
    """Data-parallel ranks."""
    max_tokens_per_micro_batch: Annotated[int, Field(ge=1)] = 16384
    """Hard cap of a packed row, tokens of prompt and response."""
    max_tokens_per_scoring_batch: Annotated[int, Field(ge=1)] | None = None
    """The same for passes without gradient; null is the value above."""
    optim: OptimConfig = OptimConfig()
    """Optimizer."""
    ema: EMAConfig | None = None
    """Keep a moving average of the weights; null keeps none."""
    compile: bool | None = None
    """Compile each decoder layer with torch.compile; null does so on GPUs."""
    offload: OffloadConfig | None = None
    """Give memory back while engines on the same GPUs sample; null keeps everything there."""


class CriticConfig(Frozen):
    """PPO's value model: a scalar head on a language model, trained beside the policy."""

    path: Path | None = None
    """Checkpoint directory: a critic or reward model with its head, or a causal LM that gets a new one; null is
    model.path."""
    optim: OptimConfig = OptimConfig(lr=5e-6)
    """Optimizer."""
    value_clip: Annotated[float, Field(gt=0)] | None = 0.2
    """New values are held within this of the old ones in the loss, arXiv:2203.02155; null does not clip."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps at the start in which the critic alone is trained."""


class LocalRuntimeConfig(Frozen):
    """Everything in the driver's process: for debuggers, notebooks and tests."""

    kind: Literal["local"]
    """Which runtime."""
    threads: Annotated[int, Field(ge=1)] | None = None
    """CPU threads of PyTorch; null leaves them to PyTorch. Tiny models are fastest with 1."""


PlacedRole = Literal["policy", "reference", "critic", "reward", "rollout"]


class PlacementGroupConfig(Frozen):
    """Roles that share GPUs: one group for all is colocate-all, one role a group is fully separate."""

    roles: Annotated[tuple[PlacedRole, ...], Field(min_length=1)]
    """policy, reference, critic, reward (model), rollout (engines); each role is in one group."""
    gpus: Annotated[int, Field(ge=1)]
    """GPUs of the group over all nodes; without GPUs, places of runtime.cpus_per_rank cores."""
    nodes: Annotated[int, Field(ge=1)] | None = None
    """Spread evenly over exactly so many nodes; null packs onto as few as there are."""


class RayRuntimeConfig(Frozen):
    """Each rank is a Ray actor."""

    kind: Literal["ray"]
    """Which runtime."""
    address: str | None = None
    """Address of a running cluster ("auto" finds it); null starts one on this machine."""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """Where models run; auto takes GPUs where the cluster has any."""
    cpus_per_rank: Annotated[float, Field(gt=0)] = 1.0
    """CPU cores reserved for each place: one GPU of a group, or without GPUs what stands for one."""
    placement: tuple[PlacementGroupConfig, ...] = ()
    """Groups of roles that share GPUs, each with its GPUs; empty is one group of trainer.ranks GPUs for all roles."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """How long all ranks may take to come up, seconds."""
    call_timeout_s: Annotated[float, Field(gt=0)] = 3600.0
    """How long one call on a rank may take before it counts as a stall, seconds."""


Runtime = Annotated[LocalRuntimeConfig | RayRuntimeConfig, Field(discriminator="kind")]


# ----------------------------------------------------------------------------------------------------------------- runs
class TrainConfig(Frozen):
    """Length and batch of a reinforcement-learning run."""

    steps: Annotated[int, Field(ge=1)] = 100
    """Steps: each samples, scores and trains on ``prompts_per_step`` prompts."""
    prompts_per_step: Annotated[int, Field(ge=1)] = 16
    """Prompts a step."""


class EvaluationConfig(Frozen):
    """Held-out scoring, of speech as corpus error rates."""

    every: Annotated[int, Field(ge=1)] | None = None
    """Evaluate after every so many steps; null evaluates at the end only."""
    before: bool = False
    """Evaluate before the first step too, and end with a table of the differences."""
    samples: Annotated[int, Field(ge=0)] = 0
    """Responses a clip for the expected error rate, at the temperature below; 0 leaves it out."""
    temperature: Annotated[float, Field(gt=0, le=2)] = 1.0
    """Temperature of those samples."""
    unit: Unit = "auto"
    """Unit of the error rate: char is CER, word is WER, mixed is MER; auto goes by each row's language."""
    bootstrap: Annotated[int, Field(ge=100)] = 1000
    """Resamples for the 95 % interval, over utterances."""
    max_new_tokens: Annotated[int, Field(ge=1)] | None = None
    """Budget of a response; null is rollout.sampling.max_new_tokens."""


class RunConfig(Frozen):
    """The run directory and what is kept in it."""

    dir: Path
    """Run directory; made if missing. A directory that holds another run is refused unless resume is set."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Fixes prompts, order, samples and losses."""
    resume: bool = False
    """Continue from the newest complete checkpoint in the directory."""
    checkpoint_every: Annotated[int, Field(ge=1)] | None = None
    """Save a checkpoint after every so many steps, and at the end; null saves none."""
    keep_checkpoints: Annotated[int, Field(ge=1)] = 2
    """Complete checkpoints kept; older ones are deleted after the new one is safe."""
    export_every: Annotated[int, Field(ge=1)] | None = None
    """Export a Hugging Face model after every so many steps."""
    export_at_end: bool = True
    """Export one after the last step; off is for trials whose model nobody will use."""
    save_rollouts: bool = True
    """Write every rollout to rollouts/step-*.parquet."""
    tensorboard: bool = True
    """Write TensorBoard events to tensorboard/."""
    progress: bool = True
    """Show progress bars on a terminal."""


class Config(Frozen):
    """A recipe. Each command reads the sections it needs: one of its own name, with data, model, trainer, runtime."""

    model: ModelConfig
    """The policy."""
    data: DataConfig
    """Training and held-out data."""
    run: RunConfig
    """Run directory, seed, checkpoints."""
    sft: SFTConfig | None = None
    """Supervised fine-tuning: needed by ``skirl sft``."""
    rm: RMConfig | None = None
    """Reward model: needed by ``skirl rm``."""
    dpo: DPOConfig | None = None
    """Preference losses: needed by ``skirl dpo``."""
    kd: KDConfig | None = None
    """Distillation: needed by ``skirl kd``."""
    prm: PRMConfig | None = None
    """Process reward model: needed by ``skirl prm``."""
    sample: SampleConfig | None = None
    """Batch inference: needed by ``skirl sample``."""
    train: TrainConfig | None = None
    """Reinforcement learning: needed by ``skirl train``."""
    rollout: RolloutConfig = RolloutConfig()
    """How responses are sampled, in training and in evaluation."""
    reward: RewardConfig | None = None
    """Where scores come from: needed by ``skirl train``."""
    method: MethodConfig = MethodConfig()
    """The algorithm, complete."""
    critic: CriticConfig | None = None
    """The value model of methods with advantage gae; null is all defaults there, and nothing elsewhere."""
    trainer: TrainerConfig = TrainerConfig()
    """How the policy is trained."""
    runtime: Annotated[Runtime, BeforeValidator(by_name)] = LocalRuntimeConfig(kind="local")
    """Where processes run."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Held-out scoring."""

    @property
    def critic_in_use(self) -> CriticConfig | None:
        """The critic of the method, or None where it needs none."""
        return (self.critic or CriticConfig()) if self.method.needs_critic else None
