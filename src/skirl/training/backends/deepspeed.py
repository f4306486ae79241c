"""DeepSpeed ZeRO 0-3, one process a rank; gloo on CPU, NCCL on GPU.

The plan already divides each loss by the counts of the whole optimizer step, so losses are multiplied by the number of
ranks to undo DeepSpeed's averaging over them, and gradients are sums.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor

from skirl.config.schema import DeepSpeedBackendConfig, OffloadConfig, OptimConfig
from skirl.errors import CheckpointError, TrainingDiverged, WorkerError
from skirl.models.policy import Policy
from skirl.records import OptimizerStep, Plan, Ratio, Sampling, TensorSpec, UpdateReport
from skirl.runtime.patches import skip_deepspeed_shared_memory_kernel
from skirl.training.backends.single import AWAY, StepTotals, run_steps, scoring_pass
from skirl.training.objective import Objective, micro_batch_loss
from skirl.training.offload import Offload, held_bytes
from skirl.training.optim import FiniteGuard, adamw, learning_rate
from skirl.training.rows import make_row

__all__ = ["DeepSpeedBackend"]

TAG = "deepspeed"


class DeepSpeedBackend:
    """Trains one rank's share of each plan.

    Args:
        dtype: of the weights; bfloat16 weights have float32 masters in the optimizer.
        total_prompts: prompts of the whole run, for the learning-rate schedule.
        offload: what ``give_back`` gives.
    """

    def __init__(
        self,
        policy: Policy,
        objective: Objective,
        optim: OptimConfig,
        config: DeepSpeedBackendConfig,
        *,
        dtype: str,
        total_prompts: int,
        offload: OffloadConfig | None = None,
    ) -> None:
        self.policy, self.policy_version = policy, 0
        self._objective, self._optim, self._total_prompts = objective, optim, total_prompts
        self._zero_stage = config.zero_stage
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        device = policy.device
        self._guard = FiniteGuard(policy.parameters(), device)
        on_gpu = device.type != "cpu"
        optimizer = adamw(policy.named_parameters(), optim, fused=on_gpu and not config.offload_optimizer)
        skip_deepspeed_shared_memory_kernel()
        self._engine: Any = deepspeed.initialize(
            model=policy, optimizer=optimizer, config=_engine_config(optim, config, dtype)
        )[0]
        self._tensors: dict[str, Any] = dict(policy.named_model_tensors())
        self._gives, self._offload = offload or OffloadConfig(), Offload(device)

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
            row, streams = make_row(plan, micro_batch, self.policy.device)
            self._engine.set_gradient_accumulation_boundary(number + 1 == len(micro_batches))
            loss, sums = micro_batch_loss(self._objective, self._engine(row, self._objective.sampling), streams)
            self._engine.backward(loss * self._num_ranks)
            totals.add(loss, sums if micro_batch.sequences else None, len(row.targets))
            if number + 1 < len(micro_batches):
                self._engine.step()  # only counts the micro-batch
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
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate
        whole = self._norm_of_whole_gradients()
        self._engine.step()
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

    # --------------------------------------------------------------------------------------------------------- weights
    def specs(self) -> tuple[TensorSpec, ...]:
        """Every tensor of the model, see ``Policy.tensor_specs``; nothing is gathered."""
        return self.policy.tensor_specs()

    @contextmanager
    def gathered(self, names: Sequence[str]) -> Iterator[Mapping[str, Tensor]]:
        """These tensors, whole, on the device, while the context is open. Under ZeRO-3 one gather for all of them:
        every rank must ask for the same names; otherwise the model's own memory.
        """
        tensors = {name: self._tensors[name] for name in names}
        sharded = [t for t in tensors.values() if hasattr(t, "ds_id")]
        with deepspeed.zero.GatheredParameters(sharded) if sharded else nullcontext():
            yield {name: tensor.detach() for name, tensor in tensors.items()}

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors of the policy's parameters under the names of the Hugging Face model; collective under ZeRO-3,
        so every rank must iterate.
        """
        for name, _ in self.policy.named_model_parameters():
            with self.gathered([name]) as tensors:
                yield name, tensors[name] if self._zero_stage < 3 else tensors[name].clone()

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
            "optimizer": states,
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
        """DeepSpeed's own checkpoint; every rank calls it."""
        assert not self._offload.is_away, AWAY
        state = {"policy_version": self.policy_version}
        if not self._engine.save_checkpoint(str(directory), tag=TAG, client_state=state, save_latest=False):
            raise CheckpointError(f"DeepSpeed could not write its checkpoint to {directory}")

    def load(self, directory: Path) -> None:
        """What ``save`` wrote; needs the same number of ranks and ZeRO stage."""
        assert not self._offload.is_away, AWAY
        path, state = self._engine.load_checkpoint(str(directory), tag=TAG)
        if path is None:
            raise CheckpointError(f"{directory} holds no DeepSpeed checkpoint named {TAG}")
        self.policy_version = state["policy_version"]


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
        "steps_per_print": 2**31,
    }
