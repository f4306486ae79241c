"""What the process imports that the tests' engines are forked from: all that an engine would, in the same order.

``import vllm`` takes most of an engine's start, some 10 s of a processor: here it is paid once for a test session.
"""

import importlib

from skirl.runtime.env import prepare_engine_environment
from skirl.runtime.patches import prepare_vllm

importlib.import_module("skirl.models.loading")  # before vLLM, which replaces some of transformers' configs
prepare_engine_environment(cpu=True)
prepare_vllm(cpu=True)
for name in ("vllm.lora.request", "vllm.v1.engine.async_llm", "vllm.v1.worker.cpu_worker"):
    importlib.import_module(name)
