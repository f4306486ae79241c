"""VLLMEngine with a real vLLM on this CPU: the contract of rollout engines, exactness, commits, deaths."""

import json
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from skirl.errors import RolloutError, WeightSyncError
from skirl.records import Request, Rollout, Sampling, TrainingSequence
from skirl.rollouts.engines.vllm import EngineSpec
from skirl.runtime.stacks import ask_for_stacks, child_pids
from skirl.training.backends.single import scoring_pass
from tests import tiny
from tests.engine_process import EngineProcess, alive, spec_of
from tests.oracles import logprobs as oracle

STOPS, BANNED = tuple(range(2, 256, 20)), tuple(range(99, 110))


@contextmanager
def running(engine: EngineProcess, spec: EngineSpec, *, audio: bool = False):
    """The process with an engine that serves; fails where it leaves a process of its own behind."""
    engine.open(spec, audio=audio)
    engine.call("start")
    children = child_pids(engine.process.pid)
    assert engine.call("child_pids")[0] in children
    yield engine
    engine.call("shutdown")
    assert alive(engine.call("child_pids")) == []
    assert [pid for pid in alive(children) if "resource_tracker" not in command(pid)] == []


def command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


@pytest.fixture(scope="module", params=["vllm_tied", "vllm_untied"])
def text(request, process, models):
    """(engine, kit, model by plain transformers)."""
    with running(process, spec_of(models[request.param])) as engine:
        yield engine, tiny.make_kit(models[request.param]), tiny.plain_model(models[request.param])


@pytest.fixture(scope="module", params=["vllm_native", "vllm_original"])
def speech(request, models):
    """(engine, kit)."""
    process = EngineProcess()
    try:
        with running(process, spec_of(models[request.param], audio=True), audio=True) as engine:
            yield engine, tiny.make_kit(models[request.param])
    finally:
        process.close()


def sampling(**settings) -> Sampling:
    usual = {"temperature": 1.5, "max_new_tokens": 10, "stop_ids": STOPS, "banned_ids": BANNED}
    return Sampling(**usual | settings)


def tokens(rollouts: Sequence[Rollout]) -> list[list[int]]:
    return [r.response_ids.tolist() for r in rollouts]


def sequence(rollout: Rollout, media: Any = ()) -> TrainingSequence:
    start, length = len(rollout.prompt_ids), len(rollout.response_ids)
    ids = np.concatenate([rollout.prompt_ids, rollout.response_ids])
    return TrainingSequence(rollout.prompt_id, ids, np.arange(start, start + length), tuple(media))


@torch.no_grad()
def largest_difference(model: Any, rollouts: Sequence[Rollout], settings: Sampling) -> float:
    """Between the engine's log-probs and those of transformers' logits, filtered and normalised in float64."""
    filters = oracle.Filters(
        settings.temperature, frozenset(settings.banned_ids), settings.top_k, settings.top_p, settings.min_p
    )
    worst = 0.0
    for rollout in rollouts:
        logits = tiny.plain_logits(model, sequence(rollout)).double().tolist()
        for row, token, found in zip(logits, rollout.response_ids.tolist(), rollout.logprobs.tolist(), strict=True):
            wanted = oracle.token(row, token, filters)
            if wanted.margin > 1e-4:  # else float32 may rightly keep another token
                worst = max(worst, abs(wanted.logprob - found))
    return worst


# -------------------------------------------------------------------------------------------------------- the contract
def test_one_rollout_a_request(text):
    engine, kit, _ = text
    assert engine.call("is_engine")
    assert engine.call("get", "batch_size") >= 1
    assert engine.call("get", "max_in_flight") == 1024
    asked = tiny.requests(kit.prompts(3), sampling(), group_size=4)[::-1]
    rollouts = engine.generate(asked)
    assert [tuple(r.prompt_ids) for r in rollouts] == [q.prompt.input_ids for q in asked]
    assert engine.generate([]) == []


def test_streams_of_a_rollout(text):
    engine, kit, _ = text
    rollouts = engine.generate(tiny.requests(kit.prompts(3), sampling(), group_size=20))
    assert {r.finish_reason for r in rollouts} == {"stop", "length"}
    for rollout in rollouts:
        ids = rollout.response_ids.tolist()
        assert 1 <= len(ids) <= 10
        assert len(rollout.logprobs) == len(rollout.versions) == len(ids)
        types = (rollout.prompt_ids.dtype, rollout.response_ids.dtype, rollout.logprobs.dtype, rollout.versions.dtype)
        assert types == (np.int64, np.int64, np.float32, np.int64)
        assert (rollout.logprobs <= 0).all()
        assert not {*BANNED} & {*ids}
        assert not {*STOPS} & {*ids[:-1]}
        assert (ids[-1] in STOPS) == (rollout.finish_reason == "stop")
        assert rollout.finish_reason == "stop" or len(ids) == 10
        decoded = kit.loaded.tokenizer.decode(ids[:-1] if rollout.finish_reason == "stop" else ids)
        assert rollout.text == decoded


def test_equal_requests_give_equal_tokens(text):
    engine, kit, _ = text
    asked = tiny.requests(kit.prompts(3), sampling(), group_size=3)
    first = engine.generate(asked)
    assert tokens(first) == tokens(engine.generate(asked[::-1])[::-1])
    assert tokens(first) == [tokens(engine.generate([one]))[0] for one in asked], "alone or in a batch"
    assert tokens(first) != tokens(engine.generate(tiny.requests(kit.prompts(3), sampling(), group_size=3, key="x")))
    neighbours = engine.generate(
        [replace(asked[0], seed=seed, sample_index=i) for i, seed in enumerate((2, 3, 2**64 - 1))]
    )
    assert len({tuple(t) for t in tokens(neighbours)}) == 3


def test_calls_may_run_side_by_side(text):
    engine, kit, _ = text
    batches = [tiny.requests([p], sampling(), group_size=2) for p in kit.prompts(3)]
    begun = [engine.begin("generate", batch) for batch in batches]
    for batch, result in zip(batches, begun, strict=True):
        assert sorted(tokens(result())) == sorted(tokens(engine.generate(batch)))


def test_a_rollout_comes_as_soon_as_it_ends(text):
    engine, kit, _ = text
    (prompt,) = kit.prompts(1)
    long, short = (tiny.requests([prompt], Sampling(max_new_tokens=n))[0] for n in (300, 2))
    ended = engine.begin("generate", [long, replace(short, sample_index=1)])()
    assert [r.sample_index for r in ended] == [1, 0]


# ------------------------------------------------------------------------------------------------------- distributions
@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7, "top_p": 0.9, "top_k": 20},
        {"temperature": 1.3, "min_p": 0.05},
        {"temperature": 0.0},
        {"banned_ids": tuple(range(0, 320, 2))},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "banned_ids": tuple(range(0, 320, 2))},
    ],
    ids=["nucleus", "min_p", "greedy", "banned", "all"],
)
def test_logprobs_are_those_of_the_sampling_distribution(text, settings, record_property):
    engine, kit, model = text
    wanted = Sampling(max_new_tokens=40, **settings)
    rollouts = engine.generate(tiny.requests(kit.prompts(4), wanted, group_size=4))
    assert not {*wanted.banned_ids} & {int(t) for r in rollouts for t in r.response_ids}
    difference = largest_difference(model, rollouts, wanted)
    record_property("vllm_vs_transformers_logprobs", difference)
    assert difference < 1e-5
    if wanted.temperature == 0:
        first = torch.stack([tiny.plain_logits(model, sequence(r))[0] for r in rollouts])
        assert first.argmax(-1).tolist() == [t[0] for t in tokens(rollouts)]


def test_only_the_stop_ids_of_the_request_end_a_response(text):
    engine, kit, _ = text
    (eos,) = kit.stop_ids
    only = Sampling(max_new_tokens=20, temperature=2.0, banned_ids=tuple(set(range(320)) - {eos, 97, 98}))
    (going,) = engine.generate(tiny.requests(kit.prompts(1), only))
    assert going.finish_reason == "length"
    assert tokens([going])[0].count(eos) > 1
    assert "<|im_end|>" in going.text
    stopped = engine.generate(tiny.requests(kit.prompts(1), replace(only, stop_ids=(eos,)), group_size=4))
    assert all(t[-1] == eos and t.count(eos) == 1 for t in tokens(stopped))
    assert all(r.finish_reason == "stop" and "<|im_end|>" not in r.text for r in stopped)


def test_what_cannot_be_served_is_refused_with_numbers(text):
    engine, kit, _ = text
    (prompt,) = kit.prompts(1)
    good = tiny.requests([prompt], sampling())[0]
    length = len(prompt.input_ids)
    cases = {
        rf"made/text0 has {length} tokens.*max_new_tokens is {1025 - length}.*max_model_len of 1024": replace(
            good, sampling=sampling(max_new_tokens=1025 - length)
        ),
        "made/text0 is empty": replace(good, prompt=replace(prompt, input_ids=(), compact_ids=())),
        "holds 1 clips, but this is an engine for text": replace(
            good, prompt=replace(prompt, media=(tiny.clip(0, 1),))
        ),
        "temperature 0.001 is too low": replace(good, sampling=sampling(temperature=0.001)),
        "out-of-vocab": replace(good, sampling=sampling(banned_ids=(99999,))),
    }
    for message, bad in cases.items():
        with pytest.raises(RolloutError, match=message):
            engine.begin("generate", [good, replace(bad, sample_index=1)])()
    full = sampling(max_new_tokens=1024 - length, stop_ids=())
    assert [len(t) for t in tokens(engine.generate(tiny.requests([prompt], full)))] == [1024 - length]
    assert engine.call("get", "num_unfinished") == 0


# -------------------------------------------------------------------------------------------------------------- weights
def test_tokens_carry_the_version_that_sampled_them(text):
    engine, kit, _ = text
    asked = tiny.requests(kit.prompts(2), Sampling(max_new_tokens=500), group_size=3)
    whole = engine.generate(asked)
    engine.call("set", "policy_version", 3)
    result = engine.begin("generate", asked)
    while not any(json.loads(engine.call("call_workers", "counts", b"")[0])):
        time.sleep(0.01)
    engine.call("pause")
    sampled = json.loads(engine.call("call_workers", "counts", b"")[0])
    late = engine.begin("generate", [replace(asked[0], sample_index=9)])
    time.sleep(0.2)
    assert json.loads(engine.call("call_workers", "counts", b"")[0]) == sampled
    engine.call("invalidate_caches")
    engine.call("set", "policy_version", 4)
    engine.call("resume")
    rollouts = {r.sample_index + 3 * (r.prompt_id == asked[-1].prompt.id): r for r in result()}
    assert tokens([rollouts[i] for i in range(6)]) == tokens(whole)
    assert all((np.diff(r.versions) >= 0).all() and {*r.versions.tolist()} == {3, 4} for r in rollouts.values())
    assert sorted((r.versions == 3).sum() for r in rollouts.values()) == sorted(sampled)
    assert {*late()[0].versions.tolist()} == {4}
    assert {int(v) for r in engine.generate(asked[:1]) for v in r.versions} == {4}


def test_caches_are_invalidated(text):
    engine, kit, model = text
    prompt = kit.prompts(1)[0]
    long = replace(
        prompt, input_ids=prompt.input_ids * 12, compact_ids=prompt.input_ids * 12
    )  # whole blocks of the cache
    asked = tiny.requests([long], Sampling(max_new_tokens=16), group_size=2)
    assert largest_difference(model, engine.generate(asked), asked[0].sampling) < 1e-5
    changed = tiny.plain_model(model.source)
    with torch.no_grad():
        for name, parameter in changed.model.named_parameters():
            if any(part in name for part in ("q_proj", "k_proj", "v_proj")):
                parameter.mul_(0.5)
    assert len(json.loads(engine.call("call_workers", "scale_layers", b"0.5")[0])) >= 2
    assert largest_difference(changed, engine.generate(asked), asked[0].sampling) > 1e-3, "stale"
    engine.call("invalidate_caches")
    assert largest_difference(changed, engine.generate(asked), asked[0].sampling) < 1e-5
    engine.call("call_workers", "scale_layers", b"2")
    engine.call("invalidate_caches")
    assert largest_difference(model, engine.generate(asked), asked[0].sampling) < 1e-5


def test_methods_of_the_workers(text):
    engine, kit, _ = text
    assert engine.call("call_workers", "echo", b"\x00\xff") == [b"\x00\xff0"]
    with pytest.raises(WeightSyncError, match=r"fail on its workers.*no such tensor"):
        engine.call("call_workers", "fail", b"no such tensor")
    assert len(engine.generate(tiny.requests(kit.prompts(1), sampling()))) == 1


def test_sleep_has_no_effect_on_the_cpu(text):
    engine, kit, _ = text
    asked = tiny.requests(kit.prompts(1), sampling(), group_size=2)
    before = tokens(engine.generate(asked))
    engine.call("sleep", 2)
    engine.call("wake", ["weights"])
    assert tokens(engine.generate(asked)) == before


# ----------------------------------------------------------------------------------------------------------------- ends
def test_abort_all_and_cancel(text):
    engine, kit, _ = text
    asked = tiny.requests(kit.prompts(2), Sampling(max_new_tokens=900), group_size=3)
    result = engine.begin("generate", asked)
    while not any(json.loads(engine.call("call_workers", "counts", b"")[0])):
        time.sleep(0.01)
    engine.call("abort_all")
    rollouts = result(timeout_s=5)
    assert {r.finish_reason for r in rollouts} == {"abort"}
    assert all(len(r.logprobs) == len(r.response_ids) < 900 for r in rollouts)
    result = engine.begin("generate", asked)
    number = engine.last
    while engine.call("get", "num_unfinished") < 6:
        time.sleep(0.01)
    assert engine.call("cancel", number)
    result(timeout_s=5)
    assert engine.call("get", "num_unfinished") == 0
    deadline = time.monotonic() + 5
    while json.loads(engine.call("call_workers", "counts", b"")[0]):
        assert time.monotonic() < deadline, "vLLM goes on with what nobody waits for"


def test_a_stuck_engine_can_be_asked_for_its_stack(text):
    engine, _, _ = text
    (core, *_) = engine.call("child_pids")
    assert "vllm/v1/engine/core.py" in ask_for_stacks([core])


VLLMS_OWN = "vllm.v1.core.sched.scheduler.Scheduler"


def test_logprobs_sent_as_numbers_are_vllms_own(models):
    """Two engines, one with a scheduler that the user chose, which is left alone. One response at a time: which ones
    share a batch depends on timing, and changes the last bit.
    """
    process, kit = EngineProcess(), tiny.make_kit(models["vllm_tied"])
    found, schedulers = [], []
    try:
        for chosen in ({}, {"scheduler_cls": VLLMS_OWN}):
            spec = spec_of(models["vllm_tied"])
            with running(process, replace(spec, arguments={**spec.arguments, **chosen})) as engine:
                schedulers += engine.call("call_workers", "scheduler", b"")
                asked = tiny.requests(kit.prompts(4), sampling(max_new_tokens=30), group_size=2)
                found.append([engine.generate([one])[0] for one in asked])
    finally:
        process.close()
    assert schedulers[0].decode().startswith("skirl.rollouts.engines.vllm_scheduler.")
    assert schedulers[1].decode() == VLLMS_OWN
    assert {r.finish_reason for r in found[0]} == {"stop", "length"}
    for ours, theirs in zip(*found, strict=True):
        assert ours.response_ids.tolist() == theirs.response_ids.tolist()
        assert ours.logprobs.tolist() == theirs.logprobs.tolist()


# --------------------------------------------------------------------------------------------------------------- speech
def policy_difference(kit: Any, rollouts: Sequence[Rollout], asked: Sequence[Request]) -> float:
    """Between the engine's log-probs and those of the trainer's policy on packed rows."""
    spans = [tiny.spans(q.prompt, kit.placeholder_id) for q in asked]
    made = [replace(sequence(r, q.prompt.media), media_spans=s) for r, q, s in zip(rollouts, asked, spans, strict=True)]
    found = scoring_pass(kit.policy, asked[0].sampling, tiny.whole(made), range(1))
    return max(float(np.abs(np.asarray(found[i]) - r.logprobs).max()) for i, r in enumerate(rollouts))


def test_speech_agrees_with_the_trainer(speech, record_property):
    engine, kit = speech
    settings = kit.sampling(max_new_tokens=20, temperature=0.7, top_p=0.9, top_k=20)
    asked = tiny.requests(kit.prompts(8), settings, group_size=3)
    rollouts = engine.generate(asked)
    assert [tuple(r.prompt_ids) for r in rollouts] == [q.prompt.input_ids for q in asked]
    assert len({len(q.prompt.input_ids) for q in asked}) > 5, "clips of different lengths, some under a second"
    assert not {*settings.banned_ids} & {int(t) for r in rollouts for t in r.response_ids}
    difference = policy_difference(kit, rollouts, asked)
    record_property("vllm_vs_policy_logprobs", difference)
    assert difference < 1e-4
    assert tokens(rollouts) == tokens(engine.generate(asked)), "with clips that are known by now"
    assert tokens(rollouts)[:4] == [tokens(engine.generate([one]))[0] for one in asked[:4]], "alone"


def test_speech_goes_on_through_a_commit(speech):
    engine, kit = speech
    asked = tiny.requests(kit.prompts(3), Sampling(max_new_tokens=300, banned_ids=kit.banned_ids), group_size=2)
    whole = engine.generate(asked)
    engine.call("set", "policy_version", 0)
    result = engine.begin("generate", asked)
    while not any(json.loads(engine.call("call_workers", "counts", b"")[0])):
        time.sleep(0.01)
    engine.call("pause")
    late = engine.begin("generate", [replace(asked[0], sample_index=9)])
    engine.call("invalidate_caches")
    engine.call("set", "policy_version", 1)
    engine.call("resume")
    rollouts = {(r.prompt_id, r.sample_index): r for r in result()}
    assert tokens([rollouts[q.prompt.id, q.sample_index] for q in asked]) == tokens(whole)
    assert {*late()[0].versions.tolist()} == {1}
    assert tokens(engine.generate(asked)) == tokens(whole)


def test_cancelled_speech_leaves_the_engine_whole(speech):
    """A request given up between vLLM's two caches of clips would make the next one with its clip fail."""
    engine, kit = speech
    for seconds in (0.0, 0.002, 0.01):
        engine.call("invalidate_caches")
        asked = tiny.requests(kit.prompts(8), kit.sampling(max_new_tokens=5), group_size=2)
        result = engine.begin("generate", asked)
        number = engine.last
        time.sleep(seconds)
        engine.call("cancel", number)
        result(timeout_s=10)
        assert len(engine.generate(asked)) == 16


def test_placeholders_that_vllm_expands_otherwise_are_refused(speech):
    engine, kit = speech
    (good,) = tiny.requests(kit.prompts(1), kit.sampling(max_new_tokens=3))
    longer = replace(good.prompt, input_ids=(*good.prompt.input_ids, 5))
    with pytest.raises(RolloutError, match=f"reads {len(longer.input_ids)} tokens, vLLM {len(good.prompt.input_ids)} "):
        engine.begin("generate", [replace(good, prompt=longer)])()
    expanded = replace(good.prompt, compact_ids=good.prompt.input_ids)
    with pytest.raises(RolloutError, match=r"holds 1 clips, but \d+ placeholders"):
        engine.begin("generate", [replace(good, prompt=expanded)])()
