"""VLLMEngine where something is wrong: arguments, a model without kernels, killed processes."""

import os
import signal
import sys
import time

import pytest

from skirl.errors import ConfigError, EngineDied, RolloutError
from skirl.records import Sampling
from skirl.rollouts.engines.arguments import installed_arguments
from skirl.runtime.stacks import child_pids
from tests import tiny
from tests.engine_process import alive, spec_of


def test_the_names_of_arguments_are_those_of_vllms_own_class(process):
    """The unit tests judge names that were read from its source as text."""
    assert process.call("argument_names") == installed_arguments()


def test_an_argument_that_vllm_refuses_is_named(process, models):
    process.open(spec_of(models["vllm_tied"], arguments={"max_num_seqs": "many"}))
    with pytest.raises(ConfigError, match=r"rollout\.vllm sets max_num_seqs.*max_num_seqs: .*integer.*'many'"):
        process.call("start")


def test_a_model_that_vllm_cannot_run_is_found_at_the_start(process, checkpoints):
    process.open(spec_of(checkpoints["tied"]))  # heads of 16
    with pytest.raises(RolloutError, match=r"ended with exit code 1, at its first token: vLLM cannot run this model"):
        process.call("start")
    process.call("shutdown")


def test_a_killed_engine_is_reported_at_once_and_leaves_nothing(process, models):
    process.open(spec_of(models["vllm_tied"]))
    process.call("start")
    children = process.call("child_pids")
    core = children[0]
    asked = tiny.requests(tiny.make_kit(models["vllm_tied"]).prompts(2), Sampling(max_new_tokens=900), group_size=3)
    sampled = process.begin("generate", asked)
    while process.call("get", "num_unfinished") < 6:
        time.sleep(0.01)
    os.kill(core, signal.SIGSTOP)  # what it is asked now is never answered
    waiting = [process.begin("call_workers", "echo", b""), process.begin("invalidate_caches")]
    time.sleep(0.2)
    start = time.monotonic()
    os.kill(core, signal.SIGKILL)
    for result in [sampled, *waiting]:
        with pytest.raises(EngineDied, match=rf"EngineCore \(pid {core}\) ended with exit code -9"):
            result(timeout_s=10)
    assert time.monotonic() - start < 5
    for name, *arguments in [("generate", asked), ("call_workers", "echo", b""), ("pause",), ("abort_all",)]:
        with pytest.raises(EngineDied):
            process.begin(name, *arguments)(timeout_s=5)
    with pytest.raises(EngineDied):
        process.call("check_alive")
    process.call("shutdown")
    assert alive(children) == []
    assert "vllm" not in sys.modules, "errors need no vLLM to be unpickled"


def test_an_engine_dies_with_its_owner(process, models):
    process.open(spec_of(models["vllm_tied"]))
    process.call("start")
    children = child_pids(process.process.pid)
    assert process.call("child_pids")[0] in children
    process.process.kill()
    deadline = time.monotonic() + 5
    while alive(children):
        assert time.monotonic() < deadline
        time.sleep(0.05)
