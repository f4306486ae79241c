"""DeepSpeed ZeRO 0-3, one process a rank; gloo on CPU, NCCL on GPU.

The plan already divides each loss by the counts of the whole optimizer step, so losses are multiplied by the number of
ranks to undo DeepSpeed's averaging over them, and gradients are sums. They are added up in float32, over micro-batches
and over ranks, whatever the type of the weights.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor

from skirl.config.muon import check_muon
from skirl.config.schema import DeepSpeedBackendConfig, EMAConfig, OffloadConfig, OptimConfig
from skirl.errors import CheckpointError, TrainingDiverged, WorkerError
from skirl.models.adapters import NamedWeight
from skirl.models.moe import zero3_leaf_modules
from skirl.records import OptimizerStep, Plan, Ratio, Sampling, TensorSpec, UpdateReport
from skirl.runtime.patches import skip_deepspeed_shared_memory_kernel
from skirl.training.backends.model import TrainedModel
from skirl.training.backends.single import AWAY, StepTotals, averaged, evaluation_pass, run_steps, scoring_pass
from skirl.training.ema import MovingAverage
from skirl.training.gradient_sums import GradientSums
from skirl.training.objective import Objective, micro_batch_loss
from skirl.training.offload import Offload, held_bytes
from skirl.training.optim import FiniteGuard, learning_rate, make_optimizer, set_rates
from skirl.training.rows import make_row

__all__ = ["DeepSpeedBackend"]

TAG = "deepspeed"
SHARDS_GRADIENTS = 2  # ZeRO stage from which DeepSpeed adds micro-batches up in a type of its own, here float32


class DeepSpeedBackend:
    """Trains one rank's share of each plan.

    Args:
        policy: what is trained: a policy, or another model called as one.
        dtype: of the weights; bfloat16 weights have float32 masters in the optimizer.
        total_prompts: prompts of the whole run, for the learning-rate schedule.
        offload: what ``give_back`` gives.
        ema: average of the trained weights that is kept beside them, sharded as they are; None keeps none.
    """

    def __init__(
        self,
        policy: TrainedModel,
        objective: Objective,
        optim: OptimConfig,
        config: DeepSpeedBackendConfig,
        *,
        dtype: str,
        total_prompts: int,
        offload: OffloadConfig | None = None,
        ema: EMAConfig | None = None,
    ) -> None:
        check_muon(optim, config)
        self.policy, self.policy_version = policy, 0
        self._objective, self._optim, self._total_prompts = objective, optim, total_prompts
        self._zero_stage = config.zero_stage
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        self._average_file = f"{TAG}_ema_{self._rank}.pt"
        device = policy.device
        self._guard = FiniteGuard(policy.parameters(), device)
        on_gpu = device.type != "cpu"
        named = list(policy.named_parameters())
        optimizer = make_optimizer(policy, named, optim, fused=on_gpu and not config.offload_optimizer)
        self._stepped = [p for group in optimizer.param_groups for p in group["params"]]
        self._summed = self._stepped if config.zero_stage < SHARDS_GRADIENTS else []
        self._sums = GradientSums(self._summed)
        skip_deepspeed_shared_memory_kernel()
        module: Any = policy  # a torch.nn.Module, which a Protocol cannot say
        if self._zero_stage == 3 and (blocks := zero3_leaf_modules(module)):
            deepspeed.utils.set_z3_leaf_modules(module, blocks)
        self._engine: Any = deepspeed.initialize(
            model=module, optimizer=optimizer, config=_engine_config(optim, config, dtype)
        )[0]
        if config.zero_stage == 0 and dtype == "bfloat16":
            self._undo_trial_step()
        self._tensors: dict[str, Any] = dict(policy.named_model_tensors())
        self._has_adapters = bool(policy.adapter_weights())
        self._committed, self._exported = policy.committed_weights(), policy.exported_weights()
        self._gives, self._offload = offload or OffloadConfig(), Offload(device)
        self._average = None if ema is None else MovingAverage(self._masters(), ema)

    @torch.no_grad()
    def _undo_trial_step(self) -> None:
        """In ZeRO-0 DeepSpeed makes the optimizer's state by a step with gradients of 0, which counts for the bias
        correction and decays the masters.
        """
        self._adam().state.clear()
        for master, parameter in zip(self._masters(), self._stepped, strict=True):
            master.copy_(parameter)

    def update(self, plan: Plan, consumed_prompts: int) -> UpdateReport:
        """Runs this rank's micro-batches of every optimizer step."""
        assert not self._offload.is_away, AWAY
        self._agree(plan)
        rate = learning_rate(self._optim, consumed_prompts, self._total_prompts)
        report = run_steps(plan, rate, self._accumulate, self._step)
        self.policy_version += 1
        return replace(report, policy_version=self.policy_version)

    def _agree(self, plan: Plan) -> None:
        """All ranks hold the same plan, or none starts."""
        mine = int(plan.hash[:15], 16)
        ends = torch.tensor([mine, -mine], dtype=torch.long, device=self.policy.device)
        dist.all_reduce(ends, op=dist.ReduceOp.MAX)
        if int(ends[0]) != mine or int(-ends[1]) != mine or plan.num_ranks != self._num_ranks:
            raise WorkerError(
                f"rank {self._rank} of {self._num_ranks} holds another plan ({plan.hash[:12]}) than its peers"
            )

    def _accumulate(self, plan: Plan, step: OptimizerStep) -> tuple[float, dict[str, Ratio]]:
        totals = StepTotals()
        micro_batches = step.ranks[self._rank]
        for number, micro_batch in enumerate(micro_batches):
            last = number + 1 == len(micro_batches)
            row, streams = make_row(plan, micro_batch, self.policy.device)
            self._engine.set_gradient_accumulation_boundary(last)
            loss, sums = micro_batch_loss(self._objective, self._engine(row, self._objective.sampling), streams)
            if last:
                self._sums.give(self._summed)  # the last backward adds to them, and reduces them over the ranks
            self._engine.backward(loss * self._num_ranks)
            totals.add(loss, sums)
            if not last:
                self._engine.step()  # only counts the micro-batch
                self._sums.take()
        return totals.on_host()

    def _step(self, rate: float, loss: float, number: int) -> float:
        bad = self._guard.take() + float(loss != loss or abs(loss) == float("inf"))
        dist.all_reduce(bad)
        if bad:
            raise TrainingDiverged(
                f"optimizer step {number} after version {self.policy_version}: a loss or gradient is not finite "
                f"(loss on rank {self._rank}: {loss}); weights and optimizer are as before the step. Lower "
                "trainer.optim.lr, or look at the rewards and advantages of this step in rollouts/"
            )
        set_rates(self._engine.optimizer.param_groups, self._optim, rate)
        whole = self._norm_of_whole_gradients()
        self._engine.step()
        if self._average is not None:
            self._average.follow(self._masters())
        norm = self._engine.get_global_grad_norm()
        return whole if norm is None else float(norm)

    def _norm_of_whole_gradients(self) -> float:
        """Gradient norm before clipping where gradients are whole on every rank; DeepSpeed keeps none in ZeRO-0."""
        gradients = [p.grad for p in self.policy.parameters() if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients)) if self._zero_stage == 0 and gradients else float("nan")

    def logprobs(self, plan: Plan, sampling: Sampling | None = None) -> dict[int, Tensor]:
        """Log-probs of this rank's sequences, by index in the plan; no gradient.

        Args: sampling: the distribution; the objective's where not given.
        """
        mine = range(self._rank, self._rank + 1)
        return scoring_pass(self._engine, sampling or self._objective.sampling, plan, mine)

    def evaluate(self, plan: Plan) -> dict[str, Ratio]:
        """The objective over this rank's share of a plan without a gradient: its metrics, and "loss" as the sum of its
        weighted losses; over the ranks the denominators of "loss" add to 1.
        """
        self._agree(plan)
        mine = range(self._rank, self._rank + 1)
        loss, metrics = evaluation_pass(self._engine, self._objective, plan, mine)
        return {**metrics, "loss": Ratio(loss, float(self._rank == 0))}

    # --------------------------------------------------------------------------------------------------------- weights
    def specs(self) -> tuple[TensorSpec, ...]:
        """Every tensor of the model, see ``PackedModel.committed_weights``; nothing is gathered."""
        return tuple(weight.spec for weight in self._committed.values())

    @contextmanager
    def gathered(self, names: Sequence[str]) -> Iterator[Mapping[str, Tensor]]:
        """These tensors, whole, on the device, while the context is open. Under ZeRO-3 one gather for all of them:
        every rank must ask for the same names; otherwise the model's own memory where no adapter is added in.
        """
        weights = {name: self._committed[name] for name in names}
        with _whole(weights.values()):
            yield {name: weight.value() for name, weight in weights.items()}

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors of the policy's parameters under the names of the Hugging Face model, adapters added in;
        collective under ZeRO-3, so every rank must iterate.
        """
        return self._one_by_one(self._exported)

    def adapter_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Matrices of the adapters under peft's names; nothing where there are none. Collective as ``parameters``."""
        return self._one_by_one(self.policy.adapter_weights())

    def _one_by_one(self, weights: Mapping[str, NamedWeight]) -> Iterator[tuple[str, Tensor]]:
        for name, weight in weights.items():
            with _whole([weight]):
                yield name, weight.value() if self._zero_stage < 3 else weight.value().clone()

    def ema_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """As ``parameters``, with the averages in place of what is trained; collective where masters are sharded, so
        every rank must iterate to the end.
        """
        assert self._average is not None, "built without ema"
        assert not self._offload.is_away, AWAY
        if self._zero_stage == 0:  # masters are whole, in the order of the optimizer's groups
            held = {id(p): a for p, a in zip(self._stepped, self._average.averages, strict=True)}
            yield from averaged(self._exported, lambda part: held.get(id(part)))
            return
        trained = {id(p) for p in self._stepped}

        def whole(part: Tensor) -> Tensor | None:
            return safe_get_full_fp32_param(part) if id(part) in trained else None

        with self._average.in_place_of(self._masters()):
            for name, weight in self._exported.items():
                with _whole([weight]):
                    found = averaged({name: weight}, whole)
                    yield from [(n, t.clone() if self._zero_stage == 3 else t) for n, t in found]

    # ---------------------------------------------------------------------------------------------------------- memory
    def give_back(self) -> int:
        """Moves optimizer state and masters to the host and frees gradients and their buffers; weights stay.

        Returns: bytes moved.
        """
        states = self._state()
        if self._gives.gradients:
            for parameter in (*self.policy.parameters(), *self._masters()):
                parameter.grad = None
        moved = [*states["optimizer"], *states["masters"]] if self._gives.optimizer else []
        return self._offload.give(moved, scratch=self._buffers() if self._gives.gradients else ())

    def take_back(self) -> int:
        """Undoes ``give_back``, bit for bit. Returns bytes moved."""
        moved = self._offload.take()
        if self._zero_stage == 3:
            self._engine.optimizer.grad_partitions_flat_buffer.zero_()  # shards are padded, and padding counts as 0
        return moved

    def state_bytes(self) -> dict[str, int]:
        """Device memory held now, by kind: weights, gradients, optimizer, masters."""
        return {kind: held_bytes(tensors, self.policy.device) for kind, tensors in self._state().items()}

    def _state(self) -> dict[str, list[Tensor]]:
        """What is held between two updates. DeepSpeed's own ``offload_states`` refuses torch's AdamW in ZeRO-3."""
        weights = [t for p in self._tensors.values() for t in (p, p.ds_tensor if hasattr(p, "ds_tensor") else p)]
        held = {t.untyped_storage().data_ptr() for t in weights}
        masters = [m for m in self._masters() if m.untyped_storage().data_ptr() not in held]
        states = [t for values in self._adam().state.values() for t in values.values() if isinstance(t, Tensor)]
        gradients = [p.grad for p in (*self.policy.parameters(), *masters) if p.grad is not None]
        return {
            "weights": weights,
            "gradients": [*gradients, *self._buffers()],
            "optimizer": states if self._average is None else [*states, *self._average.averages],
            "masters": masters,
        }

    def _adam(self) -> torch.optim.Optimizer:
        zero = self._engine.optimizer
        return zero.optimizer if hasattr(zero, "optimizer") else zero  # in ZeRO-0 and float32 nothing wraps it

    def _masters(self) -> list[Tensor]:
        """What the optimizer steps; in ZeRO-0 and float32 the weights themselves."""
        if self._zero_stage == 3:
            return list(self._engine.optimizer.fp32_partitioned_groups_flat)
        return [p for group in self._adam().param_groups for p in group["params"]]

    def _buffers(self) -> list[Tensor]:
        """Where DeepSpeed collects gradients; without meaning between two updates."""
        zero = self._engine.optimizer
        found = [zero.grad_partitions_flat_buffer] if self._zero_stage == 3 else []
        buckets = [bucket.buffer for bucket in zero.ipg_buckets.values()] if self._zero_stage > 0 else []
        for buffer in buckets:
            found += buffer if isinstance(buffer, list) else [buffer]  # ZeRO-1 and 2: a list, made anew by each update
        return [tensor for tensor in found if tensor is not None]

    # ----------------------------------------------------------------------------------------------------- checkpoints
    def save(self, directory: Path) -> None:
        """DeepSpeed's own checkpoint, and the average; every rank calls it."""
        assert not self._offload.is_away, AWAY
        if self._average is not None:
            self._average.save(directory / self._average_file)
        state = {"policy_version": self.policy_version}
        settings = {"tag": TAG, "save_latest": False, "exclude_frozen_parameters": self._has_adapters}
        if not self._engine.save_checkpoint(str(directory), client_state=state, **settings):
            raise CheckpointError(f"DeepSpeed could not write its checkpoint to {directory}")

    def load(self, directory: Path) -> None:
        """What ``save`` wrote; needs the same number of ranks and ZeRO stage."""
        assert not self._offload.is_away, AWAY
        if self._average is not None:
            self._average.load(directory / self._average_file)
        path, state = self._engine.load_checkpoint(str(directory), tag=TAG, load_module_strict=not self._has_adapters)
        if path is None:
            raise CheckpointError(f"{directory} holds no DeepSpeed checkpoint named {TAG}")
        self.policy_version = state["policy_version"]


@contextmanager
def _whole(weights: Iterable[NamedWeight]) -> Iterator[None]:
    """What these are made from, gathered meanwhile; collective where it is sharded."""
    parts = {id(part): part for weight in weights for part in weight.parts}  # experts share one
    sharded = [part for part in parts.values() if hasattr(part, "ds_id")]
    with deepspeed.zero.GatheredParameters(sharded) if sharded else nullcontext():
        yield


def _engine_config(optim: OptimConfig, config: DeepSpeedBackendConfig, dtype: str) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": config.zero_stage}
    if config.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    return {
        "train_micro_batch_size_per_gpu": 1,  # rows are packed; the plan owns accumulation
        "gradient_accumulation_steps": 1,
        "gradient_clipping": optim.max_grad_norm or 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,  # torch's own AdamW: nothing is compiled at start
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": dtype == "bfloat16"},
        "data_types": {"grad_accum_dtype": "fp32" if config.zero_stage >= SHARDS_GRADIENTS else None},
        "communication_data_type": "fp32",
        "steps_per_print": 2**31,
    }
