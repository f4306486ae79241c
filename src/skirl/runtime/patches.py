"""Changes to other libraries, each with its reason, version and condition for removal."""

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from skirl.runtime.stacks import answer_stack_requests

__all__ = ["prepare_vllm", "skip_deepspeed_shared_memory_kernel"]


def skip_deepspeed_shared_memory_kernel() -> None:
    """Keeps DeepSpeed from compiling its shared-memory collectives at start (45 to 57 s, needs g++ and ninja).

    DeepSpeed 0.19; results with two gloo ranks are bit-identical without it. Remove when DeepSpeed has a setting.
    """
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


# ----------------------------------------------------------------------------------------------------------------- vllm
def prepare_vllm(cpu: bool) -> None:
    """What a process needs before vLLM builds an engine or a model in it. May be called again.

    Args:
        cpu: the engine computes on the CPU. On GPUs nothing of vLLM is changed.
    """
    answer_stack_requests()
    if cpu:
        _do_without_torchvision()
        _keep_linear_weights()
        _keep_expert_weights()
        _inspect_models_in_process()
        _fork_engine_core()


def _keep_linear_weights() -> None:
    """Linear layers keep their weights where a commit can write them.

    vLLM 0.26 to 0.33 on the CPU repacks them for oneDNN and frees the originals: loading new ones fails after part of
    them are changed, and a tied head keeps its old copy in silence. Remove when vLLM's ``load_weights`` works in place
    on the CPU.
    """
    import vllm._custom_ops

    vllm._custom_ops._supports_onednn = False


def _keep_expert_weights() -> None:
    """Experts keep their weights where a commit can write them, and are multiplied one after another.

    vLLM 0.32 and 0.33 on the CPU repack them for a kernel of their own and drop the originals. Where the class is
    absent, commits to a mixture of experts are refused. Remove when vLLM's ``load_weights`` works in place on the CPU.
    """
    try:
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts as Experts
    except ImportError:
        return
    from torch.nn import functional
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    activations: dict[Any, Any] = {
        MoEActivation.SILU: functional.silu,
        MoEActivation.GELU: functional.gelu,
        MoEActivation.GELU_TANH: lambda values: functional.gelu(values, approximate="tanh"),
    }

    def multiply(  # noqa: PLR0917  vLLM's own signature
        self: Any,
        output: Any,
        hidden_states: Any,
        w1: Any,
        w2: Any,
        topk_weights: Any,
        topk_ids: Any,
        activation: Any,
        global_num_experts: int,
        expert_map: Any,
        *,
        apply_router_weight_on_input: bool,
        **rest: Any,
    ) -> None:
        if activation not in activations or expert_map is not None or self.w1_bias is not None:
            raise NotImplementedError(f"experts with {activation}, biases, or spread over processes, on the CPU")
        output.zero_()
        for expert in topk_ids.unique().tolist():
            tokens, places = (topk_ids == expert).nonzero(as_tuple=True)
            gate, up = functional.linear(hidden_states[tokens], w1[expert]).chunk(2, dim=-1)
            result = functional.linear(activations[activation](gate) * up, w2[expert])
            if not apply_router_weight_on_input:  # else the input has been multiplied by them
                result = result * topk_weights[tokens, places, None].to(result.dtype)
            output.index_add_(0, tokens, result.to(output.dtype))

    patched: Any = Experts
    patched.process_weights_after_loading = lambda self, layer: None
    patched.apply = multiply
    patched.skirl_keeps_weights = True


def _inspect_models_in_process() -> None:
    """vLLM looks at a model's class in a process of its own, which imports vLLM once more: 16 s with a cold cache.

    vLLM 0.26 to 0.33; it does so lest the import starts CUDA, which a CPU machine has not. Remove when vLLM has a
    setting.
    """
    import vllm.model_executor.models.registry as registry

    registry._run_in_subprocess = lambda function: function()


def _fork_engine_core() -> None:
    """The engine's process is forked from this one: started in 14 s instead of 25 s, with 200 MB less.

    vLLM 0.26 to 0.33 spawns it on the CPU and inside Ray actors, because CUDA and open sockets do not survive a fork:
    here is no CUDA, and the child closes the sockets that it inherits, so that others see this process die. Remove
    when ``import vllm`` takes less than a second.
    """
    import vllm.v1.engine.utils as engine

    fork = multiprocessing.get_context("fork")
    parent, sockets = os.getpid(), _open_sockets()

    class EngineCore(fork.Process):
        def run(self) -> None:
            for descriptor in sockets:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
            threading.Thread(target=_die_with, args=(parent,), daemon=True).start()
            answer_stack_requests()
            super().run()

    class Context:
        Process = EngineCore

        def __getattr__(self, name: str) -> Any:
            return getattr(fork, name)

    engine.get_mp_context = Context  # pyright: ignore[reportPrivateImportUsage]


def _open_sockets() -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself is gone
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:") and int(name) > 2:
                found.append(int(name))
    return found


def _die_with(parent: int) -> None:
    """Ends this process when its parent has died. (The kernel's parent-death signal follows the parent's *thread*.)"""
    while os.getppid() == parent:
        time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)


# ---------------------------------------------------------------------------------------------------------- torchvision
def _do_without_torchvision() -> None:
    """Lets vLLM's audio models be imported beside a CPU build of PyTorch without a torchvision that fits.

    vLLM 0.26 to 0.33: the class of Qwen3-ASR shares a file with image models, which import torchvision. PyPI's
    torchvision is a CUDA build whose library cannot be loaded here: the two operators that its Python half asks for
    are declared. Where there is none, an empty one takes its place that refuses any use. Remove when vLLM's audio
    models import without torchvision.
    """
    if "torchvision" in sys.modules or any(isinstance(finder, _NoTorchvision) for finder in sys.meta_path):
        return
    if importlib.util.find_spec("torchvision") is None:
        from transformers.utils.import_utils import is_torchvision_available

        is_torchvision_available()  # remembers the answer: no image processor may take the stand-in for the library
        sys.meta_path.append(_NoTorchvision())
        return
    try:
        import torchvision  # noqa: F401  # pyright: ignore[reportMissingImports]
    except RuntimeError:  # operator torchvision::nms does not exist
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        _declare_torchvision_operators()


def _declare_torchvision_operators() -> None:
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)


class _NoTorchvision(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds ``torchvision`` and the modules that image code imports from it, all of them empty."""

    MODULES = tuple(f"torchvision{rest}" for rest in ("", ".transforms", ".transforms.v2", ".transforms.v2.functional"))

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.MODULES:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        def refuse(name: str) -> Any:
            raise AttributeError(f"{module.__name__}.{name}: torchvision is not installed, and images need it")

        module.__getattr__ = refuse  # pyright: ignore[reportAttributeAccessIssue]


_kept: list[object] = []
"""Declarations that last as long as the process."""
