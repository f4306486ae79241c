"""A policy beside its teacher: whole-vocabulary divergences, a gradient to the policy alone, the policy's interface."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from skirl.errors import ModelError
from skirl.models.distilled import Distilled
from skirl.records import Sampling
from skirl.testing import tiny_models
from skirl.training.rows import make_row
from tests import tiny

CPU = torch.device("cpu")
LENGTHS = (4, 1, 7)


@pytest.fixture(scope="module")
def plan(checkpoints):
    return tiny.whole(tiny.sequences(tiny.make_kit(checkpoints["tied"]), LENGTHS))


def padded(source, directory, size):
    """The same model with embeddings of another size; its head is the embeddings."""
    shutil.copytree(source, directory)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    old = tensors["model.embed_tokens.weight"]
    tensors["model.embed_tokens.weight"] = torch.cat([old, old[: size - len(old)]]) if size > len(old) else old[:size]
    save_file({n: t.contiguous() for n, t in tensors.items()}, file, metadata={"format": "pt"})
    config = directory / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": size}))
    return directory


def distilled(student, teacher, direction="forward_kl", temperature=2.0):
    policies = [tiny.make_kit(directory).policy for directory in (student, teacher)]
    return Distilled(policies[0], policies[1], direction=direction, temperature=temperature)


def rows(plan):
    return make_row(plan, plan.steps[0].ranks[0][0], CPU)


@pytest.mark.parametrize("direction", ["forward_kl", "reverse_kl"])
def test_divergences_are_those_of_whole_distributions(checkpoints, plan, direction):
    model = distilled(checkpoints["tied"], checkpoints["untied"], direction)
    row, _ = rows(plan)
    logprobs, divergences, auxiliary = model(row, Sampling())
    assert len(auxiliary) == 0
    start = 0
    plain, teacher = (tiny.plain_model(checkpoints[name]) for name in ("tied", "untied"))
    for sequence in plan.sequences:
        q, p = ((tiny.plain_logits(m, sequence) / 2).double().log_softmax(-1) for m in (plain, teacher))
        first, second = (p, q) if direction == "forward_kl" else (q, p)
        wanted = 4 * (first.exp() * (first - second)).sum(-1)
        part = slice(start, start + sequence.num_actions)
        torch.testing.assert_close(divergences[part].double(), wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(logprobs[part], tiny.plain_logprobs(plain, sequence), rtol=1e-4, atol=1e-4)
        start += sequence.num_actions
    assert (divergences > 1e-3).all()


def test_the_gradient_reaches_the_policy_alone(checkpoints, plan):
    model = distilled(checkpoints["tied"], checkpoints["untied"])
    (teacher,) = model._teacher
    row, streams = rows(plan)
    (streams.weights * model(row, Sampling())[1]).sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())
    assert all(p.grad is None for p in teacher.parameters())


def test_a_teacher_equal_to_the_policy_has_nothing_to_teach(checkpoints, plan):
    model = distilled(checkpoints["untied"], checkpoints["untied"])
    assert model(rows(plan)[0], Sampling())[1].abs().max() < 1e-5


def test_it_is_the_policy_to_everything_else(checkpoints):
    model = distilled(checkpoints["untied"], checkpoints["tied"])
    policy = model.policy
    assert {id(p) for p in model.parameters()} == {id(p) for p in policy.parameters()}
    assert [n for n, _ in model.named_parameters()] == [f"policy.{n}" for n, _ in policy.named_parameters()]
    assert (model.device, model.loaded) == (policy.device, policy.loaded)
    assert model.exported_weights().keys() == policy.exported_weights().keys()
    assert model.committed_weights().keys() == policy.committed_weights().keys()
    assert [n for n, _ in model.named_model_tensors()] == [n for n, _ in policy.named_model_tensors()]
    model.load_state_dict(model.state_dict())


@pytest.mark.parametrize("size", [384, 260])
def test_embeddings_may_be_padded_differently(checkpoints, plan, tmp_path, size):
    """Of the longer one the ids that the other lacks are left out: no token has them."""
    other = padded(checkpoints["tied"], tmp_path / "other", size)
    divergences = distilled(checkpoints["tied"], other)(rows(plan)[0], Sampling())[1]
    assert divergences.abs().max() < 1e-5
    divergences = distilled(other, checkpoints["tied"])(rows(plan)[0], Sampling())[1]
    assert divergences.abs().max() < 1e-5


def test_a_teacher_of_other_tokens_is_refused(checkpoints, tmp_path):
    other = tiny_models.tiny_qwen3(tmp_path / "other", hidden=32, texts=["seven zeal words here"])
    sizes = [json.loads((d / "config.json").read_text())["vocab_size"] for d in (other, checkpoints["tied"])]
    with pytest.raises(ModelError, match=rf"a vocabulary of {sizes[0]}.*{sizes[1]}, .* tokens have other ids"):
        distilled(checkpoints["tied"], other)
    small = padded(checkpoints["tied"], tmp_path / "small", 200)
    with pytest.raises(ModelError, match=r"a head is smaller than the vocabulary: 320 .*, 200 of"):
        distilled(checkpoints["tied"], small)
