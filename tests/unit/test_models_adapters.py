"""LoRA and QLoRA: what trains, what the reference is, what leaves: commits, exports, adapters, merges."""

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from skirl.assemble_engines import engine_setup, expected_tensors
from skirl.config.models import LoRAConfig
from skirl.config.schema import (
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    RolloutConfig,
    RunConfig,
    VLLMEngineConfig,
)
from skirl.errors import CheckpointError, ConfigError, MissingExtra, ModelError
from skirl.models.adapters import MATRIX_B, adapters_off, add_adapters, check_reference, lora_scale
from skirl.models.loading import export_model, load_model, load_tokenizer_and_family, set_trainable
from skirl.models.merge import merge, write_adapter
from skirl.models.policy import Policy
from skirl.models.value import ValueModel, load_value_model
from skirl.records import Sampling
from skirl.rollouts.engines.arguments import engine_arguments
from skirl.testing import tiny_models
from skirl.training.backends.single import SingleBackend
from skirl.training.objective import SupervisedObjective
from skirl.training.rows import make_row
from tests import tiny

LORA = LoRAConfig(rank=4, alpha=8.0)
NF4 = LORA.model_copy(update={"quantize": "nf4"})
TARGETS = LORA.target_modules
EVERYTHING_ELSE = ("encoder", "adapter")
LENGTHS = (4, 1, 9)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module", name="checkpoints")
def with_wide_ones(checkpoints):
    """Rows of 4 bits come in blocks of 64 values."""
    tiny.BUILDERS["wide"] = partial(tiny_models.tiny_qwen3, hidden=64, tied=False)
    tiny.BUILDERS["wide speech"] = partial(tiny_models.tiny_qwen3_asr, hidden=128)
    return checkpoints


def adapted(directory: Path, lora: LoRAConfig = LORA, *, freeze: Any = EVERYTHING_ELSE, seed: int = 0, **kit: Any):
    """A kit with adapters, and the table of what trains."""
    made = tiny.make_kit(directory, **kit)
    add_adapters(made.loaded, lora, seed=seed)
    report = set_trainable(made.loaded.model, made.loaded.family, freeze)
    clips = made.clips
    return replace(made, policy=Policy(made.loaded, clips)), report


def trainer(kit: tiny.Kit) -> SingleBackend:
    return SingleBackend(kit.policy, SupervisedObjective(), OptimConfig(lr=3e-3), 100)


def plan_of(kit: tiny.Kit) -> Any:
    return tiny.whole(tiny.sequences(kit, LENGTHS, streams=False))


def trained(directory: Path, lora: LoRAConfig = LORA, steps: int = 2, **settings: Any):
    kit, _ = adapted(directory, lora, **settings)
    backend = trainer(kit)
    for number in range(steps):
        backend.update(plan_of(kit), number + 1)
    return kit, backend


def distance(one: Any, other: Any) -> float:
    assert one.keys() == other.keys()
    return max(float((one[key].float() - other[key].float()).abs().max()) for key in one)


def weights(backend: SingleBackend) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in backend.parameters()}


# ---------------------------------------------------------------------------------------------------------- what trains
KINDS = pytest.mark.parametrize(
    ("name", "lora"), [("tied", LORA), ("native", LORA), ("wide", NF4), ("wide speech", NF4)]
)


@KINDS
def test_gradients_reach_the_adapters_and_nothing_else(checkpoints, name, lora):
    kit, report = adapted(checkpoints[name], lora)
    listed = set(report.trainable["lora"])
    assert report.trainable.keys() == {"lora"}
    assert len(listed) == 2 * 2 * len(TARGETS)
    assert not [n for n in listed if "audio" in n]
    assert report.num_trainable == sum(p.numel() for p in kit.policy.parameters() if p.requires_grad)
    assert sum(report.numel.values()) > 30_000  # 4 bits count as the values that they hold
    backend = trainer(kit)
    before = {n: p.detach().clone() for n, p in kit.loaded.model.named_parameters()}
    with tiny.GradientTap(kit.policy) as tap:
        backend.update(plan_of(kit), 1)
        backend.update(plan_of(kit), 2)  # B = 0 at first: no gradient of A
    assert len(tap.sums) == len(listed)
    assert all(float(g.abs().max()) > 0 for g in tap.sums.values())
    moved = {n for n, p in kit.loaded.model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == listed


def test_the_audio_adapter_trains_beside_as_freeze_says(checkpoints):
    _, report = adapted(checkpoints["native"], freeze=("encoder",))
    assert set(report.trainable) == {"lora", "adapter"}
    assert "lora " in str(report)
    assert "adapter " in str(report)
    _, report = adapted(checkpoints["native"], freeze=("encoder", "adapter", "language_model"))
    assert set(report.trainable) == {"lora"}


def test_a_target_that_does_not_exist_is_refused_with_what_is_there(checkpoints):
    kit = tiny.make_kit(checkpoints["native"])
    with pytest.raises(ConfigError, match=r"target_modules: c_attn, lm_head: .*down_proj, gate_proj, k_proj, o_proj"):
        add_adapters(kit.loaded, LoRAConfig(target_modules=("q_proj", "c_attn", "lm_head")))
    with pytest.raises(ConfigError, match="target_modules: empty"):
        add_adapters(kit.loaded, LoRAConfig(target_modules=()))
    with pytest.raises(ConfigError, match=r"target_modules: down_proj: .*experts that are held as one tensor"):
        add_adapters(tiny.make_kit(checkpoints["moe"]).loaded, LoRAConfig(target_modules=("q_proj", "down_proj")))
    assert "lora" not in " ".join(name for name, _ in kit.loaded.model.named_parameters())


def test_the_start_is_the_loaded_model_and_the_seed_decides_the_rest(checkpoints):
    plain = tiny.make_kit(checkpoints["untied"])
    kit, _ = adapted(checkpoints["untied"])
    plan = plan_of(kit)
    assert distance(trainer(kit).logprobs(plan), trainer(plain).logprobs(plan)) == 0
    state = torch.get_rng_state()
    again, _ = adapted(checkpoints["untied"])
    other, _ = adapted(checkpoints["untied"], seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    first, same, differs = (dict(trainer(k).adapter_parameters()) for k in (kit, again, other))
    assert distance(first, same) == 0
    assert distance(first, differs) > 0


def test_bfloat16_models_have_bfloat16_adapters_with_float32_masters(checkpoints):
    kit, backend = trained(checkpoints["tied"], dtype="bfloat16")
    assert {p.dtype for p in kit.policy.parameters()} == {torch.bfloat16}
    assert {m.dtype for m in backend._masters} == {torch.float32}
    assert {s.dtype for s in backend.specs()} == {"bfloat16"}


# -------------------------------------------------------------------------------------------------------- the reference
@KINDS
def test_without_adapters_the_policy_is_its_start_exactly(checkpoints, name, lora):
    kit, _ = adapted(checkpoints[name], lora)
    backend, plan = trainer(kit), plan_of(kit)
    start = backend.logprobs(plan)
    backend.update(plan, 1)
    flags = {n: p.requires_grad for n, p in kit.policy.named_parameters()}
    with adapters_off(kit.policy):
        assert distance(backend.logprobs(plan), start) == 0
    assert distance(backend.logprobs(plan), start) > 1e-3
    assert {n: p.requires_grad for n, p in kit.policy.named_parameters()} == flags
    with pytest.raises(KeyError), adapters_off(kit.policy):
        raise KeyError
    assert distance(backend.logprobs(plan), start) > 1e-3


def test_a_reference_is_refused_where_other_weights_train_too(checkpoints):
    kit, _ = adapted(checkpoints["native"], freeze=("encoder",))
    with pytest.raises(ConfigError, match=r"4 other tensors train as well \(adapter\..*model\.freeze"):
        check_reference(kit.policy)
    with pytest.raises(ConfigError, match="other tensors train"), adapters_off(kit.policy):
        pass


# ------------------------------------------------------------------------------------------------------ what others see
@pytest.mark.parametrize("name", ["tied", "untied", "native"])
def test_specs_are_those_of_the_model_without_adapters(checkpoints, name):
    plain = tiny.make_kit(checkpoints[name])
    backend = trained(checkpoints[name])[1]
    specs = backend.specs()
    assert [(s.name, s.shape, s.dtype) for s in specs] == [
        (s.name, s.shape, s.dtype) for s in plain.policy.tensor_specs()
    ]
    told = {s.name for s in specs if s.trained}
    assert {n.split(".")[-2] for n in told} == set(TARGETS)
    assert len(told) == 2 * len(TARGETS)
    with backend.gathered([s.name for s in specs]) as tensors:
        start = plain.loaded.model.state_dict()
        assert {n for n, t in tensors.items() if not torch.equal(t, start[n])} == told
        assert all(t.shape == start[n].shape and t.dtype == start[n].dtype for n, t in tensors.items())


@pytest.mark.parametrize(
    ("name", "lora"),
    [
        ("tied", LORA),
        ("native", LORA),
        ("wide", NF4),
        ("wide speech", NF4),
        ("untied", LORA.model_copy(update={"rank_stabilized": True})),
        ("untied", LoRAConfig(rank=2, target_modules=("o_proj",))),
    ],
)
def test_the_merged_model_computes_what_the_adapted_one_does(checkpoints, tmp_path, name, lora):
    kit, backend = trained(checkpoints[name], lora)
    untouched = {n: p.detach().clone() for n, p in kit.loaded.model.named_parameters()}
    export_model(kit.loaded, weights(backend), tmp_path / "out", "same")
    assert all(torch.equal(p, untouched[n]) for n, p in kit.loaded.model.named_parameters())
    whole = tiny.make_kit(tmp_path / "out")
    plan = plan_of(kit)
    rows = make_row(plan, plan.steps[0].ranks[0][0], torch.device("cpu"))[0]
    with torch.no_grad():
        wanted, got = kit.policy.hidden(rows), whole.policy.hidden(rows)
    assert float((wanted - got).norm() / wanted.norm()) < 5e-6  # layers of these models multiply rounding by about 10
    merged = dict(backend.parameters())
    for target in {n.rsplit(".lora_", 1)[0] for n in dict(backend.adapter_parameters())}:
        layer: Any = kit.loaded.model.get_submodule(target)
        values = torch.randn(64, layer.in_features, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            wanted, got = layer(values), values @ merged[f"{target}.weight"].T
        assert float((wanted - got).norm() / wanted.norm()) < 1e-6
    start = trainer(tiny.make_kit(checkpoints[name])).logprobs(plan)
    assert distance(trainer(kit).logprobs(plan), start) > 1e-3


def test_an_export_without_the_adapted_weights_is_refused(checkpoints, tmp_path):
    kit, backend = trained(checkpoints["tied"])
    state = weights(backend)
    del state["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\.weight is missing"):
        export_model(kit.loaded, state, tmp_path / "out", "same")


def test_commits_of_adapters_carry_frozen_weights_and_adapters_apart(checkpoints):
    lora = LORA.model_copy(update={"commit": "adapter"})
    kit, backend = trained(checkpoints["tied"], lora)
    assert lora_scale(lora) == 2.0
    told = {s.name: s for s in backend.specs() if s.trained}
    mine = dict(backend.adapter_parameters())
    assert told.keys() == mine.keys()
    assert {n: s.shape for n, s in told.items()} == {n: tuple(t.shape) for n, t in mine.items()}
    start = load_model(checkpoints["tied"], dtype="float32").model.state_dict()
    with backend.gathered([s.name for s in backend.specs()]) as tensors:
        for name, tensor in tensors.items():  # engines add B A, and B has the scale in it
            wanted = 2.0 * mine[name] if name.endswith(MATRIX_B) else {**start, **mine}[name]
            assert torch.equal(tensor, wanted), name
    assert kit.loaded.lora is lora
    assert set(weights(backend)) == {s.name for s in backend.specs()} - set(told)
    assert distance({n: start[n] for n in weights(backend)}, weights(backend)) > 0


@pytest.mark.parametrize("commit", ["merged", "adapter"])
@pytest.mark.parametrize("name", ["untied", "native", "moe"])
def test_engines_expect_what_trainers_send(checkpoints, name, commit):
    targets = ("q_proj", "o_proj") if name == "moe" else TARGETS
    lora = LORA.model_copy(update={"commit": commit, "target_modules": targets})
    kit, _ = adapted(checkpoints[name], lora, freeze=("encoder",))
    model = ModelConfig(path=checkpoints[name], lora=lora)
    config = Config(model=model, data=DataConfig(), run=RunConfig(dir=checkpoints[name] / "run"))
    expected = expected_tensors(config, kit.loaded.family)
    sent = kit.policy.tensor_specs()
    assert {s.name: s for s in expected} == {s.name: s for s in sent}
    assert sum(s.trained for s in sent) >= 2 * len(targets)


def setup_of(directory: Path, **lora: Any) -> Any:
    config = Config(
        model=ModelConfig(path=directory, lora=LoRAConfig(commit="adapter", **lora)),
        data=DataConfig(),
        run=RunConfig(dir=directory / "run"),
        rollout=RolloutConfig(engine=VLLMEngineConfig(kind="vllm")),
    )
    files = load_tokenizer_and_family(directory)
    prompts = tiny.make_kit(directory).prompts(1)
    return engine_setup(config, files, prompts, Sampling(), from_checkpoint=False)


def test_engines_that_add_adapters_are_told_so(checkpoints):
    setup = setup_of(checkpoints["tied"], rank=4, target_modules=("q_proj", "up_proj"))
    arguments = engine_arguments(setup.spec, on_gpu=False)
    assert (arguments["enable_lora"], arguments["max_loras"], arguments["max_lora_rank"]) == (True, 1, 8)
    assert arguments["lora_target_modules"] == ["q_proj", "up_proj"]
    assert not any("lora" in name for name in engine_arguments(replace(setup.spec, adapter_rank=None), on_gpu=False))
    with pytest.raises(ConfigError, match=r"rank = 513: .*512 at most.*commit to merged"):
        engine_arguments(setup_of(checkpoints["tied"], rank=513).spec, on_gpu=False)
    with pytest.raises(ConfigError, match=r"rollout\.vllm\.enable_lora: .*set model\.lora"):
        engine_arguments(replace(setup.spec, arguments={"enable_lora": True}), on_gpu=False)


@pytest.mark.parametrize(("name", "reason"), [("native", "audio model"), ("moe", "mixture of experts")])
def test_adapters_are_not_sent_apart_where_engines_would_misplace_them(checkpoints, name, reason):
    with pytest.raises(ConfigError, match=f"commit = adapter: this is an? {reason}.*commit to merged"):
        setup_of(checkpoints[name], target_modules=("q_proj",))


# ------------------------------------------------------------------------------------------------------------ in 4 bits
def test_4_bits_are_what_is_held_and_computed_and_committed(checkpoints):
    kit, backend = trained(checkpoints["wide"], NF4)
    plain = trainer(tiny.make_kit(checkpoints["wide"]))
    layer = kit.loaded.model.get_submodule("model.layers.0.self_attn.q_proj.base_layer")
    assert layer.weight.dtype == torch.uint8
    assert layer.weight.numel() * 2 == layer.in_features * layer.out_features
    assert backend.state_bytes()["weights"] < 0.7 * plain.state_bytes()["weights"]
    with torch.no_grad():
        computed = layer(torch.eye(layer.in_features)).T
    weight = kit.policy.committed_weights()["model.layers.0.self_attn.q_proj.weight"]
    assert weight.base is layer.weight
    assert torch.equal(replace(weight, a=None, b=None, scale=1.0).value(), computed)
    start = load_model(checkpoints["wide"], dtype="float32").model.state_dict()[weight.spec.name]
    assert 0.05 < float((start - computed).abs().mean() / start.abs().mean()) < 0.12


def test_layers_that_do_not_fit_blocks_of_4_bits_are_refused(checkpoints):
    kit = tiny.make_kit(checkpoints["untied"])
    with pytest.raises(ModelError, match=r"q_proj has rows of 32 values, and 4 bits come in blocks of 64"):
        add_adapters(kit.loaded, NF4)


def test_a_missing_bitsandbytes_is_told_with_the_command(checkpoints, monkeypatch):
    kit = tiny.make_kit(checkpoints["wide"])
    find = importlib.import_module

    class Absent:
        def find_spec(self, name: str, *_: Any) -> None:
            if name.split(".")[0] == "bitsandbytes":
                raise ModuleNotFoundError(name)

    for name in [n for n in sys.modules if n.split(".")[0] == "bitsandbytes"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])
    with pytest.raises(MissingExtra, match=r'quantize needs bitsandbytes: run `pip install "skirl\[qlora\]"`'):
        add_adapters(kit.loaded, NF4)
    assert find("torch") is torch


# ---------------------------------------------------------------------------------------------------------- checkpoints
@pytest.mark.parametrize(
    ("name", "lora", "dtype"),
    [("native", LORA, "float32"), ("native", LORA, "bfloat16"), ("wide speech", NF4, "bfloat16")],
)
def test_a_resumed_trainer_goes_on_bit_for_bit_and_saves_no_frozen_weight(checkpoints, tmp_path, name, lora, dtype):
    kit, backend = trained(checkpoints[name], lora, dtype=dtype, freeze=("encoder",))
    backend.save(tmp_path)
    saved = torch.load(tmp_path / "single.pt", weights_only=True)["policy"]
    assert len(saved) == 2 * 2 * len(TARGETS) + 4
    plan = plan_of(kit)
    wanted = [backend.update(plan, 3).losses, backend.update(plan, 4).losses]
    fresh, _ = adapted(checkpoints[name], lora, dtype=dtype, freeze=("encoder",))
    other = trainer(fresh)
    other.load(tmp_path)
    assert [other.update(plan, 3).losses, other.update(plan, 4).losses] == wanted
    assert distance(weights(other), weights(backend)) == 0
    plain = trainer(tiny.make_kit(checkpoints[name]))
    with pytest.raises(CheckpointError, match="is of another model"):
        plain.load(tmp_path)


# ---------------------------------------------------------------------------------------------------------- peft's form
BY_PEFT = """
import json, sys, torch, transformers, peft
kind, base, adapter, whole = sys.argv[1:]
load = getattr(transformers, kind).from_pretrained
ids = torch.arange(30, 50)[None]
with torch.no_grad():
    apart = peft.PeftModel.from_pretrained(load(base, dtype="float32"), adapter)(input_ids=ids).logits
    merged = load(whole, dtype="float32")(input_ids=ids).logits
print(json.dumps([float((apart - merged).abs().max()), float(merged.abs().max()), float(merged.std())]))
"""


@pytest.mark.slow
def test_peft_loads_the_adapter_on_the_base_in_a_fresh_process(checkpoints, tmp_path):
    kit, backend = trained(checkpoints["untied"])
    export_model(kit.loaded, weights(backend), tmp_path / "whole", "same")
    write_adapter(kit.loaded, dict(backend.adapter_parameters()), tmp_path / "adapter")
    told = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert sorted(told["target_modules"]) == sorted(TARGETS)
    assert (told["r"], told["lora_alpha"], told["lora_dropout"]) == (4, 8.0, 0.0)
    command = [sys.executable, "-c", BY_PEFT, "AutoModelForCausalLM", str(checkpoints["untied"])]
    command += [str(tmp_path / "adapter"), str(tmp_path / "whole")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    difference, largest, spread = json.loads(done.stdout.splitlines()[-1])
    assert difference < 1e-5 * largest
    assert spread > 0.1


def test_a_value_head_trains_and_is_saved_whole_with_the_adapter(checkpoints, tmp_path):
    import peft

    loaded = load_value_model(checkpoints["untied"], kind="token", dtype="float32")
    add_adapters(loaded, LORA)
    report = set_trainable(loaded.model, loaded.family, ("encoder",))
    assert report.trainable["value_head"] == ("score.weight", "score.bias")
    model = ValueModel(loaded, None, reads="before")
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    backend = SingleBackend(model, SupervisedObjective(), OptimConfig(lr=1e-3), 100)
    write_adapter(loaded, dict(backend.adapter_parameters()), tmp_path / "adapter")
    export_model(loaded, weights(backend), tmp_path / "whole", "same")
    fresh = load_value_model(checkpoints["untied"], kind="token", dtype="float32").model
    ids = torch.arange(30, 50)[None]
    with torch.no_grad():
        apart = peft.PeftModel.from_pretrained(fresh, str(tmp_path / "adapter"))(input_ids=ids).logits
        whole = load_value_model(tmp_path / "whole", kind=None, dtype="float32").model(input_ids=ids).logits
    assert float((apart - whole).abs().max()) < 1e-5 * float(whole.abs().max())
    assert float(whole.abs().max()) > 0.1


# -------------------------------------------------------------------------------------------------------------- merging
@pytest.mark.parametrize("name", ["tied", "original", "moe"])
def test_merging_a_directory_gives_the_export(checkpoints, tmp_path, name):
    lora = LORA.model_copy(update={"target_modules": ("q_proj", "o_proj")}) if name == "moe" else LORA
    kit, backend = trained(checkpoints[name], lora, freeze=("encoder",))
    export_model(kit.loaded, weights(backend), tmp_path / "whole", "same")
    write_adapter(kit.loaded, dict(backend.adapter_parameters()), tmp_path / "adapter")
    merge(tmp_path / "adapter", checkpoints[name], tmp_path / "merged")
    merged, whole = (load_model(tmp_path / d, dtype="float32") for d in ("merged", "whole"))
    assert merged.layout == kit.loaded.layout
    assert distance(merged.model.state_dict(), whole.model.state_dict()) < 1e-6
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter", "merged", "whole"]
    with pytest.raises(ModelError, match="exists already"):
        merge(tmp_path / "adapter", checkpoints[name], tmp_path / "merged")


def test_a_merge_keeps_the_type_of_the_base_and_rounds_once(checkpoints, tmp_path):
    kit, backend = trained(checkpoints["untied"], dtype="bfloat16")
    half = tmp_path / "base"
    export_model(kit.loaded, load_model(checkpoints["untied"], dtype="bfloat16").model.state_dict(), half, "same")
    write_adapter(kit.loaded, dict(backend.adapter_parameters()), tmp_path / "adapter")
    merge(tmp_path / "adapter", half, tmp_path / "merged")
    with safe_open(tmp_path / "merged/model.safetensors", framework="pt") as file:
        held = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert {t.dtype for t in held.values()} == {torch.bfloat16}
    assert distance(held, weights(backend)) == 0


def test_adapters_that_do_not_belong_are_refused(checkpoints, tmp_path):
    kit, backend = trained(checkpoints["untied"])
    write_adapter(kit.loaded, dict(backend.adapter_parameters()), tmp_path / "adapter")
    with pytest.raises(ModelError, match=r"not fit the model: .*more\)\. Give --base the model .* names ") as error:
        merge(tmp_path / "adapter", checkpoints["small"], tmp_path / "merged")
    assert len(str(error.value)) < 1000, "of a list of all tensors the first"
    file = tmp_path / "adapter/adapter_model.safetensors"
    tensors = load_file(file)
    lost = next(iter(tensors))
    save_file({n: t for n, t in tensors.items() if n != lost}, file)
    with pytest.raises(ModelError, match=f"lacks tensors: {lost}"):
        merge(tmp_path / "adapter", checkpoints["untied"], tmp_path / "merged")
    save_file(tensors | {"base_model.model.other.lora_A.weight": torch.zeros(4, 4)}, file)
    with pytest.raises(ModelError, match="holds tensors that the model has no place for"):
        merge(tmp_path / "adapter", checkpoints["untied"], tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
