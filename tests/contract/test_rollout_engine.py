"""What every RolloutEngine promises: the policy's own sampler behind local workers, and the fake in both its kinds."""

import asyncio
import gc

import numpy as np
import pytest

from skirl.protocols import RolloutEngine
from skirl.records import Sampling
from skirl.rollouts.router import Router
from skirl.testing.fake_engine import FakeEngine
from tests import tiny

STOPS, BANNED = tuple(range(2, 256, 20)), tuple(range(99, 110))  # with letters among them, for the fake


@pytest.fixture(scope="module", params=["text", "speech", "fake", "fake with a scheduler"])
def made(request, checkpoints):
    """An engine, prompts for it, and a call that brings version 3 of the same weights."""
    text = tiny.make_kit(checkpoints["tied"])
    if request.param.startswith("fake"):
        scheduler = {} if request.param == "fake" else {"batch_size": 1, "max_in_flight": 6, "order": reversed_order}
        engine = FakeEngine(**scheduler)
        return engine, text.prompts(3), lambda: setattr(engine, "policy_version", 3)
    kit = text if request.param == "text" else tiny.make_kit(checkpoints["native"])
    workers = tiny.make_workers(checkpoints["tied" if request.param == "text" else "native"], with_reference=False)
    return workers.engines[0], kit.prompts(3), lambda: workers.commit(3)


def reversed_order(requests):
    return requests[::-1]


@pytest.fixture
def engine(made):
    return made[0]


@pytest.fixture
def prompts(made):
    return made[1]


def sampling(**settings):
    usual = {"temperature": 1.5, "max_new_tokens": 10, "stop_ids": STOPS, "banned_ids": BANNED}
    return Sampling(**usual | settings)


async def stream(engine, requests):
    """Rollouts in the order of the requests."""
    found = [rollout async for rollout in engine.generate(requests)]
    by_key = {(r.prompt_id, r.sample_index): r for r in found}
    assert len(by_key) == len(found) == len(requests)
    return [by_key[q.prompt.id, q.sample_index] for q in requests]


def generate(engine, requests):
    return asyncio.run(stream(engine, requests))


def test_it_is_an_engine(engine):
    assert isinstance(engine, RolloutEngine)
    assert engine.batch_size >= 1
    assert engine.max_in_flight is None or engine.max_in_flight >= 1


def test_one_rollout_a_request_in_any_order(engine, prompts):
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
        return await asyncio.gather(*(stream(engine, b) for b in batches))

    together = [[r.response_ids.tolist() for r in batch] for batch in asyncio.run(both())]
    assert together == [[r.response_ids.tolist() for r in generate(engine, batch)] for batch in batches]


def test_a_call_may_be_given_up(engine, prompts, recwarn, caplog):
    """Cancelled before the first response, or closed after it: the engine serves the next call as if nothing was."""
    asked = tiny.requests(prompts, sampling(), group_size=2)
    wanted = [r.response_ids.tolist() for r in generate(engine, asked)]

    async def give_up():
        task = asyncio.create_task(stream(engine, asked))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        rollouts = engine.generate(asked)
        await anext(rollouts)
        await rollouts.aclose()
        return await stream(engine, asked)

    assert [r.response_ids.tolist() for r in asyncio.run(give_up())] == wanted
    gc.collect()
    assert not recwarn.list
    assert not caplog.records


def test_through_the_router(engine, prompts):
    """In whichever calls it cuts the requests, the tokens are those of the requests."""
    ended = []
    groups = Router([engine], None, seed=0).sample("test", prompts, sampling(), 3, ended.append)
    wanted = generate(engine, tiny.requests(prompts, sampling(), group_size=3))
    assert [r.response_ids.tolist() for g in groups for r in g.rollouts] == [r.response_ids.tolist() for r in wanted]
    assert {g.prompt.id for g in ended} == {p.id for p in prompts}


def test_every_token_carries_the_version(made, prompts):
    engine, _, bring = made
    bring()
    rollouts = generate(engine, tiny.requests(prompts, sampling()))
    assert {int(v) for r in rollouts for v in r.versions} == {3}
