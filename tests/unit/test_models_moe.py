"""Mixtures of experts: the balance of each sequence whatever shares its row, and the names of experts on disk."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from skirl.config.schema import OptimConfig
from skirl.errors import ModelError
from skirl.models.attention import PACKED_ATTENTION, register_packed_attention
from skirl.models.checkpoints import checkpoint_specs, tensor_names
from skirl.models.compile import compile_policy
from skirl.models.loading import export_model, load_model
from skirl.models.moe import balance_losses, expert_parts, zero3_leaf_modules
from skirl.models.policy import check_packing
from skirl.models.value import ValueModel, load_value_model
from skirl.records import TrainingSequence
from skirl.rollouts.engines.policy import PolicySampler
from skirl.training.backends.single import SingleBackend, scoring_pass
from skirl.training.objective import SupervisedObjective
from skirl.training.rows import make_row
from tests import tiny

CPU = torch.device("cpu")
LENGTHS = (4, 1, 9, 6)


@pytest.fixture(scope="module")
def directory(checkpoints):
    return checkpoints["moe"]


@pytest.fixture
def kit(directory):
    return tiny.make_kit(directory)


@pytest.fixture(scope="module")
def plan(directory):
    return tiny.whole(tiny.sequences(tiny.make_kit(directory), LENGTHS))


def auxiliary_of(kit, plan):
    """Auxiliary losses by sequence, and the gradient of their mean over the batch, over all its rows."""
    kit.policy.zero_grad(set_to_none=True)
    losses = {}
    for micro_batch in (m for rank in plan.steps[0].ranks for m in rank):
        row, streams = make_row(plan, micro_batch, CPU)
        auxiliary = kit.policy(row, kit.sampling())[2]
        (streams.sequence_weights * auxiliary).sum().backward()
        losses |= dict(zip(micro_batch.sequences, auxiliary.tolist(), strict=True))
    gradients = {n: p.grad.clone() for n, p in kit.policy.named_parameters() if p.grad is not None}
    return losses, gradients


def plain_balance(directory, sequence):
    """From the paper, one sequence alone, in float64, on the logits that transformers' own forward reports."""
    model = load_model(directory, dtype="float32", attn_implementation="eager").model
    ids = torch.from_numpy(sequence.input_ids)[None]
    logits = model(input_ids=ids, use_cache=False, output_router_logits=True).router_logits
    total = 0.0
    for layer in logits:
        probabilities = layer.detach().double().softmax(-1)
        tokens, experts = probabilities.shape
        for expert in range(experts):
            chosen = sum(expert in row.topk(2).indices for row in probabilities)
            total += experts * float(chosen) / (2 * tokens) * float(probabilities[:, expert].mean())
    return total / len(logits)


# -------------------------------------------------------------------------------------------------------------- balance
def test_even_loads_cost_1_and_one_expert_for_all_costs_as_many_as_there_are():
    borders = torch.tensor([0, 4, 8], dtype=torch.int32)
    even = torch.zeros(8, 4)
    chosen = torch.arange(8)[:, None] % 4
    torch.testing.assert_close(balance_losses(even, chosen, borders), torch.ones(2))
    lopsided = torch.tensor([[50.0, 0, 0, 0]]).expand(8, 4)
    torch.testing.assert_close(
        balance_losses(lopsided, torch.zeros(8, 1, dtype=torch.long), borders), torch.full((2,), 4.0)
    )


def test_the_share_of_choices_has_no_gradient_and_the_probability_has():
    logits = torch.tensor([[1.0, 0.0], [0.5, 0.0]], requires_grad=True)
    chosen = torch.tensor([[0], [0]])
    balance_losses(logits, chosen, torch.tensor([0, 2])).sum().backward()
    p = logits.detach().softmax(-1)[:, 0]
    torch.testing.assert_close(logits.grad[:, 0], 2 * p * (1 - p) / 2)


def test_auxiliary_losses_are_the_papers(kit, directory, plan):
    losses, _ = auxiliary_of(kit, plan)
    for index, sequence in enumerate(plan.sequences):
        assert losses[index] == pytest.approx(0.001 * plain_balance(directory, sequence), rel=1e-5)
    assert len({round(value, 7) for value in losses.values()}) == len(LENGTHS)


def test_the_gradient_is_the_same_for_every_split(kit, plan):
    kit.policy.set_router_aux(0.5)
    wanted, whole = auxiliary_of(kit, plan)
    assert whole["language_model.layers.0.mlp.gate.weight"].any()
    for cuts in ([[[0], [1], [2], [3]]], [[[3, 1]], [[2, 0]]], [[[0, 1, 2]], [[3]]]):
        losses, gradients = auxiliary_of(kit, tiny.cut(plan, cuts))
        assert losses == pytest.approx(wanted, rel=1e-5)
        assert tiny.relative_difference(whole, gradients) < 1e-5


def test_recomputed_layers_are_not_counted_twice(kit, plan):
    kit.policy.set_router_aux(0.5)
    wanted, plain = auxiliary_of(kit, plan)
    kit.loaded.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    kit.policy.language_model.train()
    calls = []
    kit.policy.language_model.layers[0].mlp.gate.register_forward_hook(lambda *_: calls.append(1))
    losses, recomputed = auxiliary_of(kit, plan)
    assert len(calls) == 2
    assert losses == pytest.approx(wanted, rel=1e-6)
    assert tiny.relative_difference(plain, recomputed) < 1e-5


def test_the_factor_is_the_checkpoints_own_or_the_recipes(kit, plan):
    assert kit.policy.router_aux_coef == 0.001
    own, _ = auxiliary_of(kit, plan)
    kit.policy.set_router_aux(0.01)
    assert auxiliary_of(kit, plan)[0] == pytest.approx({i: 10 * loss for i, loss in own.items()}, rel=1e-5)
    kit.policy.set_router_aux(0.0)
    row, _ = make_row(plan, plan.steps[0].ranks[0][0], CPU)
    assert len(kit.policy(row, kit.sampling())[2]) == 0
    kit.policy.set_router_aux(None)
    with torch.no_grad():
        assert len(kit.policy(row, kit.sampling())[2]) == 0


def test_a_model_without_routers_has_no_auxiliary_loss(checkpoints):
    policy = tiny.make_kit(checkpoints["tied"]).policy
    policy.set_router_aux(0.5)
    assert policy.router_aux_coef == 0.0
    assert not policy.is_mixture
    assert zero3_leaf_modules(policy) == []


# ------------------------------------------------------------------------------------------------------------- training
def test_packed_rows_and_a_training_step(kit, plan):
    assert check_packing(kit.policy, 1e-4) < 1e-4
    assert kit.policy.is_mixture
    assert [block.__name__ for block in zero3_leaf_modules(kit.policy)] == ["Qwen3MoeSparseMoeBlock"]
    assert not compile_policy(kit.policy, True)
    backend = SingleBackend(kit.policy, SupervisedObjective(), OptimConfig(lr=1e-2), total_prompts=100)
    before = {n: p.detach().clone() for n, p in kit.policy.named_parameters()}
    reports = [backend.update(plan, 0) for _ in range(5)]
    balance = reports[0].metrics["policy/router_balance"].value
    assert np.isfinite(balance)
    assert balance > 0
    assert reports[-1].losses[0] < reports[0].losses[0]
    assert all(not torch.equal(before[n], p) for n, p in kit.policy.named_parameters())


def test_frozen_routers_stay(kit, plan):
    routers = {n: p for n, p in kit.policy.named_parameters() if n.endswith("mlp.gate.weight")}
    for parameter in routers.values():
        parameter.requires_grad_(False)
    before = {n: p.detach().clone() for n, p in routers.items()}
    backend = SingleBackend(kit.policy, SupervisedObjective(), OptimConfig(lr=1e-2), total_prompts=100)
    assert np.isfinite(backend.update(plan, 0).losses[0])
    assert all(torch.equal(before[n], p) for n, p in routers.items())
    assert not {s.name for s in backend.specs() if s.trained} & {n.replace("language_model", "model") for n in routers}


def test_values_of_a_mixture(directory, plan, tmp_path):
    import transformers

    register_packed_attention()
    loaded = load_value_model(directory, kind="token", dtype="float32", attn_implementation=PACKED_ATTENTION)
    model = ValueModel(loaded, None, "at")
    torch.nn.init.normal_(model.head.weight)
    row, _ = make_row(plan, plan.steps[0].ranks[0][0], CPU)
    assert len(model(row)[2]) == len(LENGTHS)
    export_model(loaded, {n: p.detach() for n, p in model.named_model_parameters()}, tmp_path / "critic", "same")
    plain = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path / "critic").eval()
    (sequence,) = plan.sequences[:1]
    with torch.no_grad():
        wanted = plain(input_ids=torch.from_numpy(sequence.input_ids)[None], use_cache=False).logits[0, :, 0]
    found = scoring_pass(model, None, tiny.whole([sequence]), [0])[0]
    torch.testing.assert_close(found, wanted[sequence.action_positions], rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------------------------------------------------------- names
def test_experts_have_names_of_their_own_on_disk_and_in_commits(kit, directory, plan, tmp_path):
    backend = SingleBackend(kit.policy, SupervisedObjective(), OptimConfig(lr=1e-2), total_prompts=100)
    backend.update(plan, 0)
    specs = {s.name: (s.shape, s.dtype) for s in backend.specs()}
    assert specs == checkpoint_specs(directory)
    assert specs["model.layers.1.mlp.experts.3.up_proj.weight"] == ((32, 32), "float32")
    export_model(kit.loaded, {n: t.clone() for n, t in backend.parameters()}, tmp_path / "export", "same")
    assert tensor_names(tmp_path / "export") == tensor_names(directory) == specs.keys()
    on_disk = load_file(tmp_path / "export" / "model.safetensors")
    with backend.gathered(list(specs)) as sent:
        assert all(torch.equal(sent[name], tensor) for name, tensor in on_disk.items())
        fused = kit.loaded.model.model.layers[0].mlp.experts.gate_up_proj
        assert sent["model.layers.0.mlp.experts.2.up_proj.weight"].data_ptr() == fused[2, 32:].data_ptr()
    again = load_model(tmp_path / "export", dtype="float32").model.state_dict()
    held = kit.loaded.model.state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in held.items())


def test_transformers_writes_the_same_names(kit, tmp_path):
    kit.loaded.model.save_pretrained(tmp_path / "plain")
    held = {n: p.detach() for n, p in kit.loaded.model.named_parameters()}
    export_model(kit.loaded, held, tmp_path / "ours", "same")
    plain, ours = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "ours"))
    assert plain.keys() == ours.keys()
    assert all(torch.equal(plain[name], ours[name]) for name in plain)


def test_checkpoints_that_hold_experts_fused_are_read_and_named_alike(kit, directory, tmp_path):
    copy = tmp_path / "fused"
    shutil.copytree(directory, copy)
    tensors = {n: p.detach().contiguous() for n, p in kit.loaded.model.named_parameters()}
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    assert any(name.endswith("experts.down_proj") for name in tensor_names(copy))
    assert checkpoint_specs(copy) == checkpoint_specs(directory)
    again = load_model(copy, dtype="float32").model
    assert all(torch.equal(p, again.get_parameter(n)) for n, p in kit.loaded.model.named_parameters())


def test_a_missing_expert_is_an_error(directory, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    tensors = load_file(copy / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.2.down_proj.weight"]
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.experts"):
        load_model(copy, dtype="float32")


def test_parts_cover_their_tensor_once():
    fused = torch.arange(3 * 4 * 2.0).view(3, 4, 2)
    for name in ("model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"):
        parts = expert_parts(name, fused.shape)
        assert torch.equal(torch.cat([part.of(fused).flatten() for part in parts]), fused.flatten())
        assert len({part.name for part in parts}) == len(parts)
    assert expert_parts("model.layers.0.mlp.gate.weight", (4, 2)) == []


def test_mixtures_with_other_names_are_refused(tmp_path, directory):
    from transformers import MixtralConfig, MixtralForCausalLM

    copy = tmp_path / "mixtral"
    shutil.copytree(directory, copy)
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = MixtralForCausalLM(MixtralConfig(vocab_size=320, num_key_value_heads=1, num_local_experts=2, **small))
    model.save_pretrained(copy)
    with pytest.raises(ModelError, match="experts of model_type 'mixtral' are stored in a form"):
        load_model(copy, dtype="float32")


def test_routers_without_a_known_balance_are_refused_unless_the_factor_is_0(kit):
    policy = kit.policy
    vars(policy._routers)["_known"] = False
    with pytest.raises(ModelError, match="no load-balancing loss for this mixture of experts"):
        policy.set_router_aux(0.1)
    policy.set_router_aux(0.0)


def test_the_config_may_lack_a_factor(directory, tmp_path, plan):
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"router_aux_loss_coef": 0.0}))
    kit = tiny.make_kit(copy)
    row, _ = make_row(plan, replace(plan.steps[0].ranks[0][0]), CPU)
    assert len(kit.policy(row, kit.sampling())[2]) == 0


def test_sampled_log_probs_are_those_of_training(kit):
    sampling = kit.sampling(max_new_tokens=8)
    prompts = kit.prompts(3)
    rollouts = PolicySampler(kit.policy, kit.loaded.tokenizer).generate(tiny.requests(prompts, sampling, group_size=2))
    for rollout in rollouts:
        ids = np.concatenate([rollout.prompt_ids, rollout.response_ids])
        sequence = TrainingSequence("", ids, np.arange(len(rollout.prompt_ids), len(ids)))
        found = scoring_pass(kit.policy, sampling, tiny.whole([sequence]), [0])[0].numpy()
        np.testing.assert_allclose(found, rollout.logprobs, atol=1e-4)
