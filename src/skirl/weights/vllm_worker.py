"""The receiving end inside vLLM: methods that every worker of an engine gets (``worker_extension_cls``; ADR 0008).

Imported by vLLM alone, in each of its worker processes, before the model is built there: the moment to patch what
keeps a CPU engine's weights from being written.
engine_client.EngineReceiver -> (bytes) -> SkirlWorker -> receiver.WeightReceiver -> model.load_weights
"""

import json
import logging
import pickle
import platform
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.attention import Attention, MMEncoderAttention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.platforms import current_platform

from skirl.errors import SkirlError, WeightSyncError
from skirl.models.adapters import ENGINE_ADAPTER_ID, MATRIX_A, is_sent_apart
from skirl.records import TensorSpec
from skirl.runtime.device import gpu_uuid, synchronize
from skirl.runtime.patches import prepare_vllm
from skirl.runtime.processes import end_with_owner
from skirl.weights.checksum import checksum
from skirl.weights.endpoints import Place
from skirl.weights.engine_client import Reply, WorkerPlace
from skirl.weights.receiver import WeightReceiver

__all__ = ["SkirlWorker"]

_logger = logging.getLogger(__name__)

prepare_vllm(cpu=current_platform.is_cpu())
end_with_owner()  # vLLM 0.26 to 0.33: a core whose frontend was killed waits for requests for ever, on its GPUs


class SkirlWorker:
    """What ``EngineReceiver`` calls by name. Argument and answer are pickled: vLLM's calls carry bytes unharmed.

    vLLM adds this class to its Worker's bases, so every name is ``skirl_*`` (it refuses one that the Worker has), there
    is no ``__init__``: the state is made by ``skirl_place`` and ``skirl_expect``. Nothing raises: see ``Reply``.
    """

    if TYPE_CHECKING:  # the Worker's own
        rank: int
        device: torch.device
        model_runner: Any
        vllm_config: Any

        def get_model(self) -> nn.Module:
            """Without graph wrappers."""
            ...

    _skirl_node: str | None = None
    _skirl_receiver: WeightReceiver | None = None
    _skirl_hash = ""
    _skirl_adapter: "_Adapter | None" = None

    def skirl_place(self, payload: bytes) -> bytes:
        """Where this worker is; remembered for the transports. Argument: what the senders call the machine, or None."""

        def place(node: str | None) -> WorkerPlace:
            self._skirl_node = node
            free, total = torch.accelerator.get_memory_info(self.device) if _on_gpu(self) else (0, 0)
            return WorkerPlace(self.rank, _place(self), free, total)

        return _answer(self, payload, place)

    def skirl_expect(self, payload: bytes) -> bytes:
        """What a whole commit must bring. Argument: tuple[TensorSpec, ...]."""

        def expect(tensors: tuple[TensorSpec, ...]) -> None:
            model = self.get_model()
            _refuse_converted_weights(model)
            apart = {spec.name for spec in tensors if is_sent_apart(spec.name)}
            self._skirl_adapter = _Adapter(self, apart) if apart else None
            self._skirl_receiver = WeightReceiver(
                load=lambda named: _load(self, named),
                expected=tensors,
                device=self.device,
                place=_place(self),
                worker_rank=self.rank,
                named_parameters=model.named_parameters,
            )

        return _answer(self, payload, expect)

    def skirl_begin(self, payload: bytes) -> bytes:
        """Argument: (Manifest, transport, setup). Answers the manifest's hash as this worker computes it."""

        def begin(argument: tuple[Any, Any, bytes]) -> str:
            manifest, transport, setup = argument
            if self._skirl_adapter is not None:
                self._skirl_adapter.forget()
            _receiver(self).begin(manifest, transport, setup)
            self._skirl_hash = manifest.hash
            return self._skirl_hash

        return _answer(self, payload, begin)

    def skirl_receive(self, payload: bytes) -> bytes:
        """Argument: a Bucket. Its buffer may be filled again after the answer."""
        return _answer(self, payload, lambda bucket: _receiver(self).receive(bucket))

    def skirl_finish(self, payload: bytes) -> bytes:
        """Argument: the version. Answers (version, manifest hash) that this worker holds now."""

        def finish(version: int) -> tuple[int | None, str]:
            receiver = _receiver(self)
            receiver.finish(version)
            return receiver.version, self._skirl_hash

        return _answer(self, payload, finish)

    def skirl_abort(self, payload: bytes) -> bytes:
        """Answers the version that this worker still holds; None where the commit had begun to load."""

        def abort(_: None) -> int | None:
            _receiver(self).abort()
            return _receiver(self).version

        return _answer(self, payload, abort)

    def skirl_forget(self, payload: bytes) -> bytes:
        """The weights are gone, or of no version: the next commit must be whole."""
        return _answer(self, payload, lambda _: _receiver(self).forget())

    def skirl_version(self, payload: bytes) -> bytes:
        """Answers the version of the weights; None: of none."""
        return _answer(self, payload, lambda _: _receiver(self).version)

    def skirl_progress(self, payload: bytes) -> bytes:
        """Answers {request id: tokens sampled so far} of unfinished requests."""
        return _answer(self, payload, lambda _: _progress(self.model_runner))

    def skirl_fingerprint(self, payload: bytes) -> bytes:
        """Answers {parameter name: checksum}: equal weights have equal ones on every machine."""
        return _answer(self, payload, lambda _: {n: _checksum(p) for n, p in self.get_model().named_parameters()})


# -------------------------------------------------------------------------------------------------------------- answers
def _answer(worker: SkirlWorker, payload: bytes, call: Callable[[Any], Any]) -> bytes:
    try:
        reply = Reply(worker.rank, call(pickle.loads(payload)))
    except SkirlError as error:
        reply = Reply(worker.rank, error=str(error))
    except Exception as error:  # fence: what leaves a worker puts the answers of tensor-parallel ranks out of step
        _logger.exception("worker %d: a call by skirl failed", worker.rank)
        reply = Reply(worker.rank, error=f"engine worker {worker.rank}: {type(error).__name__}: {error}")
    return reply.encode()


def _receiver(worker: SkirlWorker) -> WeightReceiver:
    if worker._skirl_receiver is None:
        raise WeightSyncError(f"engine worker {worker.rank} was not told which tensors to expect: call expect() first")
    return worker._skirl_receiver


def _place(worker: SkirlWorker) -> Place:
    return Place(worker._skirl_node or platform.node(), gpu_uuid() if _on_gpu(worker) else None)


def _on_gpu(worker: SkirlWorker) -> bool:
    return worker.device.type != "cpu"


# -------------------------------------------------------------------------------------------------------------- loading
def _load(worker: SkirlWorker, named: list[tuple[str, Tensor]]) -> None:
    """In place: the memory that graphs have captured stays. Each tensor-parallel rank copies its own part."""
    plain = [(name, tensor) for name, tensor in named if not is_sent_apart(name)]
    model = worker.get_model()
    with torch.no_grad(), set_current_vllm_config(worker.vllm_config), _as_without_adapters(model):
        model.load_weights(iter(plain))  # pyright: ignore[reportCallIssue]
    if worker._skirl_adapter is not None:
        worker._skirl_adapter.take([(name, tensor) for name, tensor in named if is_sent_apart(name)])
    synchronize()


@contextmanager
def _as_without_adapters(model: nn.Module) -> Iterator[None]:
    """Modules under the names that ``load_weights`` knows: vLLM wraps each layer that may get an adapter."""
    named = model.named_modules(remove_duplicate=False)
    wrappers = [(name, module) for name, module in named if isinstance(module, BaseLayerWithLoRA)]
    for name, wrapper in wrappers:
        model.set_submodule(name, wrapper.base_layer)  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        for name, wrapper in wrappers:
            model.set_submodule(name, wrapper)


class _Adapter:
    """The adapter that commits bring, in the place of the one before. vLLM reads adapters from directories only.

    Args: names: of its matrices, all of which every commit brings.
    """

    def __init__(self, worker: SkirlWorker, names: set[str]) -> None:
        self._worker, self._names = worker, names
        self._came: dict[str, Tensor] = {}

    def forget(self) -> None:
        """Of what an aborted commit brought."""
        self._came = {}

    def take(self, named: list[tuple[str, Tensor]]) -> None:
        """Keeps copies; the last one makes it whole, and in use."""
        self._came |= {name: tensor.to("cpu", copy=True) for name, tensor in named}
        if self._came.keys() == self._names:
            self._install()
            self._came = {}

    def _install(self) -> None:
        runner = self._worker.model_runner
        rank = next(tensor.shape[0] for name, tensor in self._came.items() if name.endswith(MATRIX_A))
        targets = sorted({name.rsplit(".", 3)[1] for name in self._came})
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets, "bias": "none"}
        runner.remove_lora(ENGINE_ADAPTER_ID)
        with tempfile.TemporaryDirectory(prefix="skirl-adapter-") as directory:
            (Path(directory) / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
            named = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in self._came.items()}
            save_file(named, Path(directory) / "adapter_model.safetensors")
            request = LoRARequest("policy", ENGINE_ADAPTER_ID, directory)
            if not runner.add_lora(request):
                raise WeightSyncError(f"engine worker {self._worker.rank}: vLLM did not take the adapter")


def _refuse_converted_weights(model: nn.Module) -> None:
    """After loading a checkpoint vLLM lets layers convert their weights (quantized, packed, absorbed). A commit writes
    what the layer loaded from, and would leave what it computes with as it was.
    """
    plain = {
        method.process_weights_after_loading
        for method in (QuantizeMethodBase, UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
    }
    converted = [f"{model.__class__.__name__}'s own hook"] if _has_hook(model) else []
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)  # getattr: only layers that may be quantized have it
        if isinstance(method, QuantizeMethodBase):
            if type(method).process_weights_after_loading not in plain and not _is_plain_moe(method):
                converted.append(f"{name} ({type(method).__name__})")
        elif name and _has_hook(module) and not isinstance(module, Attention | MMEncoderAttention | QuantizeMethodBase):
            converted.append(f"{name} ({type(module).__name__})")
    if converted:
        more = f" and {len(converted) - 3} more" if len(converted) > 3 else ""
        raise WeightSyncError(
            "vLLM converts weights of this model after loading, so that commits would not reach what it computes with: "
            f"{', '.join(converted[:3])}{more}. Use a model without quantization and latent attention, on GPUs with "
            "Triton's kernels for experts (rollout.vllm.moe_backend: triton)"
        )


def _has_hook(module: nn.Module) -> bool:
    return hasattr(module, "process_weights_after_loading")


def _is_plain_moe(method: QuantizeMethodBase) -> bool:
    """Experts stay as they were loaded: Triton's kernels read that layout; on the CPU ``prepare_vllm`` sees to it."""
    experts = getattr(method, "experts_cls", None)  # getattr: only the method of experts has it
    if hasattr(experts, "skirl_keeps_weights"):
        return True
    backend = getattr(method, "unquantized_backend", None)  # getattr: only the unquantized method of experts has it
    return backend is not None and backend.name in ("TRITON", "BATCHED_TRITON")


# -------------------------------------------------------------------------------------------------------------- looking
def _progress(runner: Any) -> dict[str, int]:
    """Counts a token from the moment that its step was launched, whether or not it has been delivered."""
    if hasattr(runner, "requests"):
        return {name: len(request.output_token_ids) for name, request in runner.requests.items()}
    states = runner.req_states  # vLLM's second model runner
    totals = states.total_len.gpu.tolist()
    return {name: totals[row] - int(states.prompt_len.np[row]) for name, row in states.req_id_to_index.items()}


def _checksum(parameter: Tensor) -> int:
    flat = parameter.detach().reshape(-1)
    aligned = flat if flat.data_ptr() % 8 == 0 else flat.clone()
    return checksum(aligned.view(torch.uint8))
