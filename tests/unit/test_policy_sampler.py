"""The policy's own sampler: its log-probs are the trainer's, its tokens are keyed, its distribution is the softmax."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from skirl.algorithms.logprobs import sampling_logits
from skirl.records import Sampling
from skirl.rollouts.engines.policy import PolicySampler
from skirl.step import rollout_sequence
from skirl.training.backends.single import scoring_pass
from tests import tiny

NAMES = ("tied", "untied", "windowed", "native")
DISTRIBUTIONS = {
    "plain": {},
    "nucleus": {"temperature": 0.7, "top_p": 0.9, "top_k": 20},
    "min_p": {"min_p": 0.05},
}


@pytest.fixture(scope="module", params=NAMES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def kit(checkpoints, name):
    return tiny.make_kit(checkpoints[name])


@pytest.fixture
def sampler(kit):
    return PolicySampler(kit.policy, kit.loaded.tokenizer)


def early_stops(kit):
    """Besides the real end token, every tenth byte, so that random weights do end some responses."""
    return (*kit.stop_ids, *range(0, 256, 10))


def by_key(rollouts):
    return {(r.prompt_id, r.sample_index): r for r in rollouts}


def same(one, other):
    """Equal tokens; equal log-probs up to the order of sums in batches of another shape."""
    return (
        one.response_ids.tolist() == other.response_ids.tolist()
        and np.abs(one.logprobs - other.logprobs).max() < 1e-5
        and (one.finish_reason, one.text, one.prompt_ids.tolist())
        == (other.finish_reason, other.text, other.prompt_ids.tolist())
    )


# ------------------------------------------------------------------------------------------------------------ log-probs
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_logprobs_are_those_of_the_trainer(kit, name, sampler, distribution, record_property):
    sampling = replace(kit.sampling(max_new_tokens=12, **DISTRIBUTIONS[distribution]), stop_ids=early_stops(kit))
    asked = tiny.requests(kit.prompts(5), sampling, group_size=3)
    rollouts = sampler.generate(asked)
    assert len({len(r.response_ids) for r in rollouts}) > 3  # rows end at different times
    made = [rollout_sequence(q.prompt, r, kit.placeholder_id) for q, r in zip(asked, rollouts, strict=True)]
    plan = tiny.cut(tiny.whole(made), [[list(range(4)), list(range(4, 11)), list(range(11, 15))]])
    trainer = scoring_pass(kit.policy, sampling, plan, [0])
    difference = max(float(np.abs(trainer[i].numpy() - r.logprobs).max()) for i, r in enumerate(rollouts))
    record_property(f"sampler_vs_trainer/{name}/{distribution}", difference)
    assert difference < 1e-5
    assert all((r.logprobs <= 0).all() and r.logprobs.dtype == np.float32 for r in rollouts)
    if distribution != "plain":  # the filters do change the distribution
        raw = scoring_pass(kit.policy, Sampling(), plan, [0])
        assert max(float((raw[i] - trainer[i]).abs().max()) for i in raw) > 0.1


# ------------------------------------------------------------------------------------------------------------ same seed
def test_equal_requests_give_equal_tokens_whatever_the_batch(kit, sampler):
    asked = tiny.requests(kit.prompts(4), kit.sampling(max_new_tokens=10), group_size=3)
    together = by_key(sampler.generate(asked))
    assert len(together) == 12
    assert all(same(r, together[key]) for key, r in by_key(sampler.generate(asked[::-1])).items())
    for request in asked[::2]:  # no sibling, no other prompt: no padding either
        (single,) = sampler.generate([request])
        assert same(single, together[request.prompt.id, request.sample_index])
    again = sampler.generate(asked)
    assert all(a.logprobs.tobytes() == together[a.prompt_id, a.sample_index].logprobs.tobytes() for a in again)


def test_siblings_and_seeds_differ(kit, sampler):
    prompt = kit.prompts(1)[0]
    sampling = kit.sampling(max_new_tokens=8)
    tokens = {tuple(r.response_ids) for r in sampler.generate(tiny.requests([prompt], sampling, group_size=16))}
    assert len(tokens) == 16
    other = {
        tuple(r.response_ids) for r in sampler.generate(tiny.requests([prompt], sampling, group_size=16, key="later"))
    }
    assert not tokens & other


def test_rollouts_come_in_the_order_of_the_requests_with_their_prompts(kit, sampler):
    sampler.policy_version = 7
    asked = tiny.requests(kit.prompts(3), kit.sampling(max_new_tokens=3), group_size=2)
    mixed = [asked[i] for i in (5, 0, 3, 1, 4, 2)]
    for request, rollout in zip(mixed, sampler.generate(mixed), strict=True):
        assert (rollout.prompt_id, rollout.sample_index) == (request.prompt.id, request.sample_index)
        assert tuple(rollout.prompt_ids) == request.prompt.input_ids
        assert rollout.versions.tolist() == [7] * len(rollout.response_ids)
    assert sampler.generate([]) == []


# ---------------------------------------------------------------------------------------------------------- how it ends
def test_stop_token_is_the_last_action_token(kit, sampler):
    stops = early_stops(kit)
    sampling = replace(kit.sampling(max_new_tokens=9), stop_ids=stops)
    rollouts = sampler.generate(tiny.requests(kit.prompts(4), sampling, group_size=6))
    ended = [r for r in rollouts if r.finish_reason == "stop"]
    assert 4 <= len(ended) < len(rollouts)
    for rollout in rollouts:
        tokens = rollout.response_ids.tolist()
        assert not set(tokens[:-1]) & set(stops)
        assert (tokens[-1] in stops) == (rollout.finish_reason == "stop")
        assert rollout.finish_reason == "stop" or len(tokens) == 9
        assert len(rollout.logprobs) == len(rollout.versions) == len(tokens)
        written = tokens[:-1] if rollout.finish_reason == "stop" else tokens
        assert rollout.text == kit.loaded.tokenizer.decode(written)


def test_one_token_is_the_whole_budget(kit, sampler):
    sampling = replace(kit.sampling(max_new_tokens=1), stop_ids=early_stops(kit))
    rollouts = sampler.generate(tiny.requests(kit.prompts(2), sampling, group_size=40))
    assert {len(r.response_ids) for r in rollouts} == {1}
    assert {r.finish_reason for r in rollouts} == {"stop", "length"}
    assert all((int(r.response_ids[0]) in sampling.stop_ids) == (r.finish_reason == "stop") for r in rollouts)


def test_special_tokens_stay_in_the_text(checkpoints):
    """Rewards see what was written; only the stop token is left out."""
    kit = tiny.make_kit(checkpoints["native"])
    sampler = PolicySampler(kit.policy, kit.loaded.tokenizer)
    ids = kit.loaded.tokenizer.convert_tokens_to_ids
    everything = set(range(kit.policy.head.weight.shape[0]))
    only = {ids("<asr_text>"), ids("<|im_start|>")}
    sampling = replace(kit.sampling(max_new_tokens=6), banned_ids=tuple(sorted(everything - only)))
    texts = [r.text for r in sampler.generate(tiny.requests(kit.prompts(1), sampling, group_size=8))]
    assert {t.replace("<asr_text>", "").replace("<|im_start|>", "") for t in texts} == {""}
    assert any("<asr_text>" in t for t in texts)
    assert any("<|im_start|>" in t for t in texts)


def test_banned_ids_never_appear(kit, sampler):
    prompts, settings = kit.prompts(2), {"temperature": 2.0, "max_new_tokens": 20}
    free = sampler.generate(tiny.requests(prompts, kit.sampling(**settings), group_size=64))
    seen = np.concatenate([r.response_ids for r in free])
    common = np.bincount(seen).argsort()[-30:].tolist()  # likely ones, so that the ban has something to do
    banned = tuple(sorted({*common, *kit.banned_ids}))
    sampling = replace(kit.sampling(**settings), banned_ids=banned)
    rollouts = sampler.generate(tiny.requests(prompts, sampling, group_size=64))
    drawn = np.concatenate([r.response_ids for r in rollouts])
    assert len(drawn) > 2000
    assert np.isin(seen, banned).mean() > 0.1
    assert not np.isin(drawn, banned).any()
    assert not np.isin(seen, kit.banned_ids).any()


# --------------------------------------------------------------------------------------------------------- distribution
def test_greedy_equals_generate_of_transformers(checkpoints, kit, name, sampler):
    sampling = kit.sampling(temperature=0.0, max_new_tokens=12)
    asked = tiny.requests(kit.prompts(5), sampling)
    rollouts = sampler.generate(asked)  # one padded batch
    plain = tiny.plain_model(checkpoints[name])
    plain.model.generation_config.pad_token_id = kit.stop_ids[0]
    for request, rollout in zip(asked, rollouts, strict=True):
        inputs = tiny.plain_inputs(plain, request.prompt.input_ids, request.prompt.media)
        output = plain.model.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=12,
            eos_token_id=list(kit.stop_ids),
            suppress_tokens=list(kit.banned_ids) or None,
        )
        assert rollout.response_ids.tolist() == output[0, len(request.prompt.input_ids) :].tolist()
    assert len({tuple(r.response_ids) for r in rollouts}) > 1


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_first_tokens_follow_the_softmax(checkpoints, kit, name, sampler, distribution, record_property):
    """Pearson's chi-square of 4000 samples, of transformers' own distribution; the bound is 5 standard deviations."""
    sampling = kit.sampling(max_new_tokens=1, **DISTRIBUTIONS[distribution])
    prompt, count = kit.prompts(2)[1], 4000
    rollouts = sampler.generate(tiny.requests([prompt], sampling, group_size=count))
    observed = np.bincount([int(r.response_ids[0]) for r in rollouts], minlength=kit.policy.head.weight.shape[0])

    plain = tiny.plain_model(checkpoints[name])
    with torch.no_grad():
        logits = plain.model(**tiny.plain_inputs(plain, prompt.input_ids, prompt.media)).logits[0, -1:]
    expected = count * sampling_logits(
        logits,
        temperature=sampling.temperature,
        banned_ids=torch.tensor(sampling.banned_ids, dtype=torch.long),
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
    )[0].softmax(-1).double().numpy()  # fmt: skip
    assert observed[expected == 0].sum() == 0
    often = expected >= 5
    cells = [(observed[often], expected[often]), ([observed[~often].sum()], [expected[~often].sum()])]
    square = sum(((np.asarray(o) - e) ** 2 / np.maximum(e, 1e-9)).sum() for o, e in cells)
    degrees = int(often.sum())
    deviations = (square - degrees) / np.sqrt(2 * degrees)
    record_property(f"chi_square_deviations/{name}/{distribution}", float(deviations))
    assert degrees >= 5
    assert deviations < 5


@pytest.mark.parametrize("name", ["qwen2_audio", "glmasr", "voxtral", "audioflamingo3"])
def test_other_audio_families_agree_with_the_trainer(checkpoints, name, record_property):
    kit = tiny.make_kit(checkpoints[name])
    sampling = kit.sampling(max_new_tokens=6)
    asked = tiny.requests(kit.prompts(4), sampling, group_size=2)
    rollouts = PolicySampler(kit.policy, kit.loaded.tokenizer).generate(asked)
    made = [rollout_sequence(q.prompt, r, kit.placeholder_id) for q, r in zip(asked, rollouts, strict=True)]
    trainer = scoring_pass(kit.policy, sampling, tiny.whole(made), [0])
    difference = max(float(np.abs(trainer[i].numpy() - r.logprobs).max()) for i, r in enumerate(rollouts))
    record_property(f"sampler_vs_trainer/{name}/plain", difference)
    assert difference < 1e-5
