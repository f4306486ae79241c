"""What every RolloutEngine promises: the policy's own sampler behind local workers, and the fake."""

import asyncio

import numpy as np
import pytest

from skirl.protocols import RolloutEngine
from skirl.records import Sampling
from skirl.testing.fake_engine import FakeEngine
from tests import tiny

STOPS, BANNED = tuple(range(2, 256, 20)), tuple(range(99, 110))  # with letters among them, for the fake


@pytest.fixture(scope="module", params=["text", "speech", "fake"])
def made(request, checkpoints):
    """An engine, prompts for it, and a call that brings version 3 of the same weights."""
    text = tiny.make_kit(checkpoints["tied"])
    if request.param == "fake":
        engine = FakeEngine()
        return engine, text.prompts(3), lambda: setattr(engine, "policy_version", 3)
    kit = text if request.param == "text" else tiny.make_kit(checkpoints["native"])
    workers = tiny.make_workers(checkpoints["tied" if request.param == "text" else "native"], with_reference=False)
    return workers.engines[0], kit.prompts(3), lambda: workers.commit(3)


@pytest.fixture
def engine(made):
    return made[0]


@pytest.fixture
def prompts(made):
    return made[1]


def sampling(**settings):
    usual = {"temperature": 1.5, "max_new_tokens": 10, "stop_ids": STOPS, "banned_ids": BANNED}
    return Sampling(**usual | settings)


def generate(engine, requests):
    return asyncio.run(engine.generate(requests))


def test_it_is_an_engine(engine):
    assert isinstance(engine, RolloutEngine)
    assert engine.batch_size >= 1


def test_one_rollout_a_request_in_order(engine, prompts):
    asked = tiny.requests(prompts, sampling(), group_size=4)[::-1]
    rollouts = generate(engine, asked)
    assert [(r.prompt_id, r.sample_index) for r in rollouts] == [(q.prompt.id, q.sample_index) for q in asked]
    assert [tuple(r.prompt_ids) for r in rollouts] == [q.prompt.input_ids for q in asked]
    assert generate(engine, []) == []


def test_streams_of_a_rollout(engine, prompts):
    rollouts = generate(engine, tiny.requests(prompts, sampling(), group_size=20))
    assert {r.finish_reason for r in rollouts} == {"stop", "length"}
    for rollout in rollouts:
        tokens = rollout.response_ids.tolist()
        assert 1 <= len(tokens) <= 10
        assert len(rollout.logprobs) == len(rollout.versions) == len(tokens)
        types = (rollout.prompt_ids.dtype, rollout.response_ids.dtype, rollout.logprobs.dtype, rollout.versions.dtype)
        assert types == (np.int64, np.int64, np.float32, np.int64)
        assert (rollout.logprobs <= 0).all()
        assert not {*BANNED} & {*tokens}
        assert not {*STOPS} & {*tokens[:-1]}
        assert (tokens[-1] in STOPS) == (rollout.finish_reason == "stop")
        assert rollout.finish_reason == "stop" or len(tokens) == 10


def test_equal_requests_give_equal_tokens(engine, prompts):
    asked = tiny.requests(prompts, sampling(), group_size=3)
    first, again = generate(engine, asked), generate(engine, asked[::-1])[::-1]
    assert [r.response_ids.tolist() for r in first] == [r.response_ids.tolist() for r in again]
    assert [r.text for r in first] == [r.text for r in again]
    other = generate(engine, tiny.requests(prompts, sampling(), group_size=3, key="other"))
    assert [r.response_ids.tolist() for r in first] != [r.response_ids.tolist() for r in other]


def test_a_budget_of_one_token(engine, prompts):
    rollouts = generate(engine, tiny.requests(prompts, sampling(max_new_tokens=1), group_size=4))
    assert {len(r.response_ids) for r in rollouts} == {1}


def test_calls_may_run_side_by_side(engine, prompts):
    batches = [tiny.requests([p], sampling(), group_size=2) for p in prompts]

    async def both():
        return await asyncio.gather(*(engine.generate(b) for b in batches))

    together = [[r.response_ids.tolist() for r in batch] for batch in asyncio.run(both())]
    assert together == [[r.response_ids.tolist() for r in generate(engine, batch)] for batch in batches]


def test_every_token_carries_the_version(made, prompts):
    engine, _, bring = made
    bring()
    rollouts = generate(engine, tiny.requests(prompts, sampling()))
    assert {int(v) for r in rollouts for v in r.versions} == {3}
