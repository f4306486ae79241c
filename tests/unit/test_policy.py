"""Packed rows: equal to each sequence alone, and to transformers' own forward on unpadded sequences."""

import shutil
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import softmax

from skirl.errors import ModelError
from skirl.models.attention import packed_attention
from skirl.models.checkpoints import checkpoint_specs
from skirl.models.moe import split_experts
from skirl.models.policy import check_packing
from skirl.records import MicroBatch, Sampling, TensorSpec
from skirl.rollouts.engines.policy import PolicySampler
from skirl.training.backends.single import scoring_pass
from skirl.training.rows import make_row
from tests import tiny

TEXT, SPEECH = ("tied", "untied", "windowed"), ("native", "original")
LENGTHS = (4, 1, 9, 6, 2)
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=[*TEXT, *SPEECH])
def name(request):
    return request.param


@pytest.fixture(scope="module")
def kit(checkpoints, name):
    return tiny.make_kit(checkpoints[name])


def scored(kit, plan, sampling=None):
    return scoring_pass(kit.policy, sampling or Sampling(), plan, range(plan.num_ranks))


def largest(one, other):
    return max(float((one[i] - other[i]).abs().max()) for i in one)


def gradients(kit, plan, sampling):
    """Of a sum in which every token's log-prob and entropy has a weight of its own."""
    kit.policy.zero_grad(set_to_none=True)
    for micro_batch in plan.steps[0].ranks[0]:
        row, streams = make_row(plan, micro_batch, CPU)
        logprobs, entropy, _ = kit.policy(row, sampling)
        (streams.weights * (logprobs + 0.3 * entropy)).sum().backward()
    found = {name: p.grad.clone() for name, p in kit.policy.named_parameters() if p.grad is not None}
    kit.policy.zero_grad(set_to_none=True)
    return found


def weighted(kit, seed=1):
    made = tiny.sequences(kit, LENGTHS)
    random = np.random.default_rng(seed)
    return replace(tiny.whole(made), weights=tuple(random.standard_normal(s.num_actions) for s in made))


# --------------------------------------------------------------------------------------------------------------- packed
def test_logprobs_of_packed_rows_equal_each_sequence_alone(kit, name, record_property):
    plan = weighted(kit)
    in_one_row, each = scored(kit, plan), scored(kit, tiny.alone(plan))
    shuffled = scored(kit, tiny.cut(plan, [[[3, 0, 2], [4, 1]]]))
    difference = max(largest(in_one_row, each), largest(shuffled, each))
    record_property(f"packed_vs_alone_logprobs/{name}", difference)
    assert difference < 1e-5
    assert len(in_one_row) == len(LENGTHS)
    assert [len(in_one_row[i]) for i in range(len(LENGTHS))] == list(LENGTHS)


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.7, top_p=0.9, top_k=20)], ids=["plain", "filtered"]
)
def test_gradients_of_packed_rows_equal_each_sequence_alone(kit, name, sampling, record_property):
    plan = weighted(kit)
    sampling = replace(sampling, banned_ids=kit.banned_ids)
    difference = tiny.relative_difference(gradients(kit, tiny.alone(plan), sampling), gradients(kit, plan, sampling))
    record_property(f"packed_vs_alone_gradients/{name}", difference)
    assert difference < 1e-5


def test_logprobs_equal_transformers_own_forward(checkpoints, kit, name, record_property):
    """One unpadded sequence, eager attention, logits -> log_softmax."""
    plan = weighted(kit)
    plain = tiny.plain_model(checkpoints[name])
    with torch.no_grad():
        wanted = {i: tiny.plain_logprobs(plain, s) for i, s in enumerate(plan.sequences)}
    difference = largest(scored(kit, plan), wanted)
    record_property(f"packed_vs_transformers_logprobs/{name}", difference)
    assert difference < 1e-5


def test_gradients_equal_transformers_own_forward(checkpoints, kit, name, record_property):
    plan = weighted(kit)
    plain = tiny.plain_model(checkpoints[name])
    for sequence, weight in zip(plan.sequences, plan.weights, strict=True):
        (torch.from_numpy(weight) * tiny.plain_logprobs(plain, sequence)).sum().backward()
    trained = {name for name, p in kit.policy.named_model_parameters() if p.requires_grad}
    wanted = {name: p.grad for name, p in plain.model.named_parameters() if name in trained}

    kit.policy.zero_grad(set_to_none=True)
    row, streams = make_row(plan, plan.steps[0].ranks[0][0], CPU)
    (streams.weights * kit.policy(row, Sampling())[0]).sum().backward()
    got = {name: p.grad for name, p in kit.policy.named_model_parameters() if name in trained}
    difference = tiny.relative_difference(wanted, got)
    record_property(f"packed_vs_transformers_gradients/{name}", difference)
    assert difference < 1e-5
    kit.policy.zero_grad(set_to_none=True)


def test_log_probs_depend_on_context_and_audio(kit):
    """So that the tests above can fail: another clip, or another token long before, changes what is predicted."""
    made = tiny.sequences(kit, (6,))
    before = scored(kit, tiny.whole(made))[0]
    changed = made[0].input_ids.copy()
    changed[5] = (changed[5] + 1) % 200
    assert (before - scored(kit, tiny.whole([replace(made[0], input_ids=changed)]))[0]).abs().max() > 1e-3
    if kit.is_audio:
        other = replace(made[0], media=(tiny.clip(2, 0.4),))
        assert (before - scored(kit, tiny.whole([other]))[0]).abs().max() > 1e-2


def test_a_packed_row_without_borders_is_refused(kit):
    embeddings = torch.zeros(1, 5, kit.policy.head.weight.shape[1])
    with pytest.raises(AssertionError, match="without cu_seq_lens_q"):
        kit.policy.language_model(inputs_embeds=embeddings, position_ids=torch.arange(5)[None], use_cache=False)


def test_check_packing_passes_what_packs_and_names_what_does_not(checkpoints, kit):
    assert check_packing(kit.policy, 1e-5) < 1e-5
    layer = kit.policy.language_model.layers[0]
    hook = layer.register_forward_hook(lambda _module, _args, out: out + 0.1 * out.cumsum(1))  # a recurrent state
    try:
        with pytest.raises(ModelError, match=r"model type .* cannot be trained on packed rows: .* differ by"):
            check_packing(kit.policy, 1e-4)
    finally:
        hook.remove()


# ------------------------------------------------------------------------------------------------------------ attention
class Grouped(torch.nn.Module):
    """What attention functions read of their module."""

    num_key_value_groups = 2
    is_causal = True


def attention_by_hand(query, key, value, borders, scaling, window):
    """[1, N, H, D] in float64: each query over the keys of its own sequence, at most ``window`` back."""
    heads, total = query.shape[1], query.shape[2]
    out = torch.zeros(1, total, heads, query.shape[3], dtype=torch.float64)
    for start, end in pairwise(borders):
        for n in range(start, end):
            first = start if window is None else max(start, n - window + 1)
            for h in range(heads):
                keys, values = (t[0, h // 2, first : n + 1].double() for t in (key, value))
                out[0, n, h] = softmax(keys @ query[0, h, n].double() * scaling, dim=0) @ values
    return out


@pytest.mark.parametrize("window", [None, 1, 3, 50])
def test_packed_attention_equals_a_masked_reference(window):
    generator = torch.Generator().manual_seed(0)
    borders = [0, 5, 6, 13, 15]
    query = torch.randn(1, 4, 15, 8, generator=generator)
    key, value = (torch.randn(1, 2, 15, 8, generator=generator) for _ in range(2))
    extra = {} if window is None else {"sliding_window": window}
    got, _ = packed_attention(
        Grouped(), query, key, value, None, 0.3,
        cu_seq_lens_q=torch.tensor(borders, dtype=torch.int32), max_length_q=7, **extra,
    )  # fmt: skip
    assert (got - attention_by_hand(query, key, value, borders, 0.3, window)).abs().max() < 1e-6


# ---------------------------------------------------------------------------------------------------------------- roles
def test_parameters_have_the_names_of_the_model_and_a_frozen_encoder_is_no_part(kit):
    named = dict(kit.policy.named_model_parameters())
    of_model = dict(kit.loaded.model.named_parameters())
    assert all(parameter is of_model[name] for name, parameter in named.items())
    assert len(named) == len(list(kit.policy.parameters()))
    assert set(of_model) - set(named) == {name for name, p in of_model.items() if not p.requires_grad}


@pytest.mark.parametrize("freeze", [("encoder",), ()])
def test_a_dummy_row_reaches_every_trained_module_and_changes_nothing(checkpoints, name, freeze):
    """Every rank calls every trained module, so that backends which shard or reduce by module do not wait for it."""
    kit = tiny.make_kit(checkpoints[name], freeze=freeze)
    plan = tiny.whole(tiny.sequences(kit, LENGTHS))
    row, streams = make_row(plan, MicroBatch(()), CPU)
    assert streams.weights.tolist() == [0.0]
    for stream in (streams.advantages, streams.old_logprobs, streams.rollout_logprobs, streams.reference_logprobs):
        assert stream.tolist() == [0.0]
    logprobs, entropy, _ = kit.policy(row, Sampling(banned_ids=kit.banned_ids))
    (streams.weights * (logprobs + entropy)).sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in kit.policy.parameters() if p.requires_grad)


def test_a_row_lists_every_token_once(kit):
    plan = tiny.whole(tiny.sequences(kit, LENGTHS))
    row, streams = make_row(plan, MicroBatch((3, 0)), CPU)
    first, second = plan.sequences[3], plan.sequences[0]
    assert row.input_ids.tolist() == [*first.input_ids, *second.input_ids]
    assert row.position_ids.tolist() == [*range(first.num_tokens), *range(second.num_tokens)]
    assert row.cu_seqlens.tolist() == [0, first.num_tokens, first.num_tokens + second.num_tokens]
    assert row.longest == max(first.num_tokens, second.num_tokens)
    assert row.targets.tolist() == [
        *first.input_ids[first.action_positions],
        *second.input_ids[second.action_positions],
    ]
    assert row.input_ids[row.predictors + 1].tolist() == row.targets.tolist()
    assert row.clips == first.media + second.media
    assert streams.advantages.tolist() == np.float32([*first.advantages, *second.advantages]).tolist()
    if kit.is_audio:
        assert row.placeholders.tolist() == (row.input_ids == kit.placeholder_id).nonzero()[:, 0].tolist()
    else:
        assert len(row.placeholders) == 0


def test_placeholders_in_a_response_are_ordinary_tokens(checkpoints):
    """Taken from the prompt only: a sampled placeholder asks for no features."""
    kit = tiny.make_kit(checkpoints["native"])
    made = tiny.sequences(kit, (5,))[0]
    ids = made.input_ids.copy()
    ids[made.action_positions[2]] = kit.placeholder_id
    found = scored(kit, tiny.whole([replace(made, input_ids=ids)]))[0]
    assert torch.isfinite(found).all()


# ------------------------------------------------------------------------------------------------------------- decoding
def test_a_policy_samples_while_its_layers_are_recomputed_in_training(checkpoints):
    """transformers drops the cache of a layer in training mode; the policy must train on afterwards as before."""
    kit = tiny.make_kit(checkpoints["tied"])
    requests = tiny.requests(kit.prompts(2), kit.sampling(max_new_tokens=4))
    sampler = PolicySampler(kit.policy, kit.loaded.tokenizer)
    wanted = [r.response_ids.tolist() for r in sampler.generate(requests)]
    kit.loaded.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    kit.policy.language_model.train()
    assert [r.response_ids.tolist() for r in sampler.generate(requests)] == wanted
    assert all(module.training for module in kit.policy.language_model.modules())


# -------------------------------------------------------------------------------------------------------------- tensors
@pytest.mark.parametrize("name", tiny.BUILDERS)
@pytest.mark.parametrize("freeze", [("encoder",), ()])
def test_specs_of_a_policy_and_of_its_checkpoint_agree(checkpoints, name, freeze):
    kit = tiny.make_kit(checkpoints[name], freeze=freeze)
    specs = kit.policy.tensor_specs()
    on_disk = checkpoint_specs(checkpoints[name])
    assert {s.name: (s.shape, s.dtype) for s in specs} == on_disk
    assert len(specs) == len(on_disk)
    parameters = split_experts(dict(kit.loaded.model.named_parameters()))
    trained = {n for n, p in parameters.items() if p.requires_grad}
    assert {s.name for s in specs if s.trained} == trained
    assert (len(trained) < len(specs)) == (kit.is_audio and (bool(freeze) or bool(kit.loaded.family.constant)))
    held = kit.loaded.model.state_dict()
    assert all(tensor.data_ptr() == held[name].data_ptr() for name, tensor in kit.policy.named_model_tensors())


def test_specs_name_the_type_of_the_weights_in_training(checkpoints):
    specs = tiny.make_kit(checkpoints["native"], dtype="bfloat16").policy.tensor_specs()
    assert {s.dtype for s in specs} == {"bfloat16"}


def test_persistent_buffers_are_listed_and_others_are_not(checkpoints):
    kit = tiny.make_kit(checkpoints["small"])
    kit.loaded.model.register_buffer("kept", torch.zeros(3), persistent=True)
    kit.loaded.model.register_buffer("computed", torch.zeros(3), persistent=False)
    kit.loaded.shapes["kept"] = (3,)
    assert kit.policy.tensor_specs()[-1] == TensorSpec("kept", (3,), "float32", trained=False)
    assert "computed" not in dict(kit.policy.named_model_tensors())


def test_a_checkpoint_that_stores_its_tied_head_counts_it_once(checkpoints, tmp_path):
    directory = tmp_path / "model"
    shutil.copytree(checkpoints["tied"], directory)
    wanted = checkpoint_specs(directory)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file)
    assert checkpoint_specs(directory) == wanted
    assert "lm_head.weight" in checkpoint_specs(checkpoints["untied"])
