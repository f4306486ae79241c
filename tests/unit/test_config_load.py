"""Recipes: inheritance, flags, precedence, provenance, and the exact messages of what cannot be read."""

from pathlib import Path

import pytest

from skirl.config.load import leaves, load
from skirl.errors import ConfigError

BASE = """\
model:
  path: models/tiny
data:
  train:
    hard: {path: hard.jsonl}
run:
  dir: runs/a
reward:
  terms:
    accuracy: accuracy
    words: {kind: keywords, weight: 0.2}
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a recipe below the working directory and returns its relative path."""
    monkeypatch.chdir(tmp_path)

    def put(name: str, text: str) -> Path:
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    put("base.yaml", BASE)
    return put


def message(recipe: Path, *flags: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(recipe, flags)
    return str(caught.value)


def problem(write, text: str, *flags: str) -> str:
    return message(write("x.yaml", "inherits: base.yaml\n" + text), *flags)


# ----------------------------------------------------------------------------------------------- precedence, provenance
def test_flags_win_over_the_recipe_over_what_it_inherits_over_the_preset_over_defaults(write):
    write("lower.yaml", "inherits: base.yaml\nmethod: {kl: {coef: 0.5}}\ntrainer: {optim: {lr: 3.0, eps: 1e-7}}\n")
    recipe = write("x.yaml", "inherits: lower.yaml\ntrainer:\n  optim:\n    lr: 2.0\n    weight_decay: 0.1\n")
    loaded = load(recipe, ["--trainer.optim.lr", "1e-6"])
    optim, kl = loaded.config.trainer.optim, loaded.config.method.kl
    assert kl is not None
    assert (optim.lr, optim.weight_decay, optim.eps, kl.coef) == (1e-6, 0.1, 1e-7, 0.5)
    origins = loaded.provenance
    assert origins["trainer.optim.lr"] == "--trainer.optim.lr"
    assert origins["trainer.optim.weight_decay"] == "x.yaml:5"
    assert origins["trainer.optim.eps"] == "lower.yaml:3"
    assert origins["model.path"] == "base.yaml:2"
    assert origins["method.kl.coef"] == "lower.yaml:2"
    assert origins["method.kl.estimator"] == "preset grpo"
    assert origins["method.advantage.eps"] == "default"
    assert origins["run.seed"] == "default"


def test_every_leaf_has_an_origin_and_nothing_else_has(write):
    loaded = load(write("x.yaml", "inherits: base.yaml\nmethod: {kl: null}\nruntime: ray\n"))
    assert list(loaded.provenance) == [path for path, _ in leaves(loaded.config)]
    assert loaded.provenance["method.kl"] == "x.yaml:2"
    assert loaded.provenance["runtime.kind"] == "x.yaml:3"
    assert loaded.provenance["runtime.address"] == "default"
    assert loaded.provenance["data.eval"] == "default"


def test_several_parents_the_later_wins_and_paths_are_relative_to_the_file(write):
    write("common/one.yaml", "run: {seed: 1, dir: one}\n")
    write("common/two.yaml", "run: {seed: 2}\n")
    recipe = write("asr/x.yaml", "inherits: [../base.yaml, ../common/one.yaml, ../common/two.yaml]\n")
    loaded = load(recipe)
    assert (loaded.config.run.seed, str(loaded.config.run.dir)) == (2, "one")
    assert loaded.provenance["run.seed"] == "common/two.yaml:1"


def test_a_file_may_be_inherited_by_two_paths(write):
    write("left.yaml", "inherits: base.yaml\nrun: {seed: 7}\n")
    write("right.yaml", "inherits: base.yaml\n")
    assert load(write("x.yaml", "inherits: [left.yaml, right.yaml]\n")).config.run.seed == 7


@pytest.mark.parametrize("flags", [["--run.seed", "5"], ["--run.seed=5"], ["--run.seed", "4", "--run.seed=5"]])
def test_forms_of_a_flag_and_the_last_one_wins(write, flags):
    assert load(Path("base.yaml"), flags).config.run.seed == 5


def test_flag_alone_is_true_and_values_are_yaml(write):
    flags = ["--run.resume", "--model.freeze", "[]", "--method.kl", "null", "--evaluation.every=10"]
    config = load(Path("base.yaml"), flags).config
    assert config.run.resume is True
    assert config.model.freeze == ()
    assert config.method.kl is None
    assert config.evaluation.every == 10


# -------------------------------------------------------------------------------------------------------------- merging
def test_another_kind_replaces_and_the_same_kind_merges(write):
    recipe = write("x.yaml", "inherits: base.yaml\nruntime: {kind: ray, address: auto, cpus_per_rank: 3}\n")
    kept = load(recipe, ["--runtime", "ray", "--runtime.cpus_per_rank", "2"]).config.runtime
    assert kept.model_dump(include={"kind", "address", "cpus_per_rank"}) == {
        "kind": "ray",
        "address": "auto",
        "cpus_per_rank": 2.0,
    }
    assert load(recipe, ["--runtime.kind", "local"]).config.runtime.model_dump() == {"kind": "local", "threads": None}
    assert load(recipe, ["--runtime", "local"]).config.runtime.model_dump() == {"kind": "local", "threads": None}


def test_a_bare_kind_below_takes_settings_from_above(write):
    recipe = write("x.yaml", "inherits: base.yaml\ntrainer: {backend: deepspeed}\n")
    backend = load(recipe, ["--trainer.backend.zero_stage", "3"]).config.trainer.backend
    assert backend.model_dump() == {"kind": "deepspeed", "zero_stage": 3, "offload_optimizer": False}


def test_kinds_of_one_class_keep_their_other_settings(write):
    recipe = write("x.yaml", "inherits: base.yaml\ntrainer: {optim: {schedule: {kind: cosine, warmup: 0.1}}}\n")
    schedule = load(recipe, ["--trainer.optim.schedule", "linear"]).config.trainer.optim.schedule
    assert (schedule.kind, schedule.warmup) == ("linear", 0.1)


def test_null_takes_out_an_inherited_entry(write):
    reward = load(Path("base.yaml"), ["--reward.terms.words", "null"]).config.reward
    assert reward is not None
    assert list(reward.terms) == ["accuracy"]


def test_another_preset_brings_its_whole_record(write):
    method = load(Path("base.yaml"), ["--method.preset", "dr_grpo", "--method.normalizer.length", "99"]).config.method
    assert method.kl is None
    assert method.advantage.kind == "group_mean"
    assert method.normalizer.model_dump() == {"kind": "constant", "length": 99}


def test_saved_json_loads_back_equal(write):
    recipe = write(
        "x.yaml",
        "inherits: base.yaml\ntrain: {steps: 3}\nruntime: ray\ntrainer: {backend: deepspeed, optim: {lr: 1e-6}}\n"
        "method: {preset: dr_grpo, kl: {where: reward, estimator: k1}, policy_loss: {dual: 3}}\n",
    )
    config = load(recipe).config
    saved = write("config.json", config.model_dump_json(indent=2))
    assert load(saved).config == config


# ----------------------------------------------------------------------------------------------------------- YAML traps
def test_yaml_traps(write):
    text = (
        "inherits: base.yaml\n"
        "trainer: {optim: {lr: 1e-6, eps: 1E-8, weight_decay: .5}}\n"
        "data: {train: {hard: {language: no}, 2024: {path: b.jsonl}}}\n"
        "run: {dir: 2024-01-01, seed: 1_000, resume: true}\n"
        "evaluation: {every: ~}\n"
    )
    config = load(write("x.yaml", text)).config
    assert (config.trainer.optim.lr, config.trainer.optim.eps, config.trainer.optim.weight_decay) == (1e-6, 1e-8, 0.5)
    assert config.data.train["hard"].language == "no"  # Norwegian, not false
    assert list(config.data.train) == ["hard", "2024"]
    assert (str(config.run.dir), config.run.seed, config.run.resume) == ("2024-01-01", 1000, True)
    assert config.evaluation.every is None


def test_home_directory_is_understood(write, monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    assert str(load(Path("base.yaml"), ["--model.path=~/m"]).config.model.path) == "/home/someone/m"


# ------------------------------------------------------------------------------------------------------------- messages
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("trainer:\n  lr: 1.0\n", "x.yaml:3: there is no setting trainer.lr; did you mean trainer.optim.lr?"),
        ("trian:\n  steps: 1\n", "x.yaml:2: there is no setting trian; did you mean train?"),
        (
            "rollout: {sampling: {temprature: 1}}\n",
            "x.yaml:2: there is no setting rollout.sampling.temprature; did you mean rollout.sampling.temperature?",
        ),
        (
            "data: {train: {hard: {pth: x}}}\n",
            "x.yaml:2: there is no setting data.train.hard.pth; did you mean data.train.hard.path?",
        ),
        (
            "learning_rate: 1\n",
            "x.yaml:2: there is no setting learning_rate; did you mean trainer.optim.lr?",
        ),
        (
            "xyzzy: 1\n",
            "x.yaml:2: there is no setting xyzzy; a recipe has: model, data, run, sft, rm, dpo, kd, prm, sample, "
            "train, rollout, reward, method, critic, trainer, runtime, evaluation.",
        ),
        (
            "trainer.optim.lr: 1\n",
            "x.yaml:2: there is no setting trainer.optim.lr; names with dots are for flags; in a file, nest them.",
        ),
        (
            "trainer:\n  optim:\n    lr: abc\n",
            "x.yaml:4: trainer.optim.lr is 'abc'; it must be a number > 0. (Peak learning rate.)",
        ),
        (
            "trainer: {ranks: 0}\n",
            "x.yaml:2: trainer.ranks is 0; it must be a whole number >= 1. (Data-parallel ranks.)",
        ),
        (
            "trainer: {ranks: true}\n",
            "x.yaml:2: trainer.ranks is true; it must be a whole number >= 1. (Data-parallel ranks.)",
        ),
        (
            "rollout: {group_size: 1.5}\n",
            "x.yaml:2: rollout.group_size is 1.5; it must be a whole number >= 1. (Responses a prompt.)",
        ),
        (
            "trainer: {optim: {lr: .inf}}\n",
            "x.yaml:2: trainer.optim.lr is inf; it must be a finite number > 0. (Peak learning rate.)",
        ),
        (
            "trainer: {optim: {betas: [0.9, 2]}}\n",
            "x.yaml:2: trainer.optim.betas[1] is 2; it must be a number >= 0 and < 1. (Decay rates of the two "
            "moments.)",
        ),
        (
            "model: {dtype: bf16}\n",
            "x.yaml:2: model.dtype is 'bf16'; it must be one of float32, bfloat16; did you mean bfloat16? (Type of the "
            "weights in training and sampling; log-probs are float32 in any case.)",
        ),
        (
            "run: {save_rollouts: 1}\n",
            "x.yaml:2: run.save_rollouts is 1; it must be true or false. (Write every rollout to "
            "rollouts/step-*.parquet.)",
        ),
        (
            "run: {dir: 2024}\n",
            "x.yaml:2: run.dir is 2024; it must be a path; put it in quotes: '2024'. (Run directory; made if "
            "missing. A "
            "directory that holds another run is refused unless resume is set.)",
        ),
        (
            "run: {dir: ''}\n",
            "x.yaml:2: run.dir is ''; it must be a path. (Run directory; made if missing. A directory that holds "
            "another "
            "run is refused unless resume is set.)",
        ),
        (
            "trainer: {ranks: {a: 1}}\n",
            "x.yaml:2: trainer.ranks is a mapping; it must be a whole number >= 1. (Data-parallel ranks.)",
        ),
        ("runtime: rya\n", "x.yaml:2: runtime is 'rya'; it must be one of local, ray; did you mean ray?"),
        (
            "trainer: {backend: {zero_stage: 1}}\n",
            "x.yaml:2: trainer.backend.zero_stage belongs to kind deepspeed, but trainer.backend is single (the "
            "default); "
            "set trainer.backend.kind to deepspeed, or remove trainer.backend.zero_stage.",
        ),
        (
            "method: {normalizer: {length: 9}}\n",
            "x.yaml:2: method.normalizer.length belongs to kind constant, but method.normalizer is sequence (preset "
            "grpo); set method.normalizer.kind to constant, or remove method.normalizer.length.",
        ),
        (
            "method: {normalizer: constant}\n",
            "x.yaml:2: method.normalizer.length is missing; it must be a whole number >= 1. (The constant, usually "
            "rollout.sampling.max_new_tokens; 1 sums over tokens (RLOO: a response is one action).)",
        ),
        (
            "reward: {terms: {a: {weight: 1}}}\n",
            "x.yaml:2: reward.terms.a names no kind; set reward.terms.a.kind to one of accuracy, keywords, language, "
            "repetition, length, truncation, math, code.",
        ),
        (
            "data: {train: {a/b: {path: x}}}\n",
            "x.yaml:2: data.train has an entry named 'a/b'; use letters, digits, - and _.",
        ),
        ("run:\n  seed: 1\n  seed: 2\n", "x.yaml:4: seed is given twice, first at x.yaml:3; remove one."),
        ("run: {seed: 1}\nrun: {seed: 2}\n", "x.yaml:3: run is given twice, first at x.yaml:2; remove one."),
        ("trainer: &t\n  <<: *t\n", "x.yaml:3: YAML merge keys (<<) are not read; use inherits."),
        ("trainer: &t\n  optim: *t\n", "x.yaml:3: the value contains itself (a YAML alias to an outer anchor)."),
        (
            "run: !!python/name:os.system x\n",
            "x.yaml:2: the YAML tag python/name:os.system is not read; write the plain value.",
        ),
        ("run: {seed: [1}\n", "x.yaml:2: not valid YAML: expected ',' or ']', but got '}'."),
    ],
)
def test_messages_for_files(write, text, expected):
    assert problem(write, text) == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--trainer.lr", "1"], "--trainer.lr: there is no setting trainer.lr; did you mean --trainer.optim.lr?"),
        (["--lr", "1"], "--lr: there is no setting lr; did you mean --trainer.optim.lr?"),
        (
            ["--model.path.x", "1"],
            "--model.path.x: there is no setting model.path.x; model.path takes no settings of its own.",
        ),
        (
            ["--rollout.group_size", "abc"],
            "--rollout.group_size: rollout.group_size is 'abc'; it must be a whole number >= 1. (Responses a prompt.)",
        ),
        (
            ["--trainer.ranks"],
            "--trainer.ranks: trainer.ranks has no value; write --trainer.ranks VALUE (a whole number >= 1).",
        ),
        (["--run.seed", ""], "--run.seed: the value is empty (an unset shell variable?); write null to unset it."),
        (["--run.seed="], "--run.seed: the value is empty (an unset shell variable?); write null to unset it."),
        (["run.seed", "1"], "run.seed: a word without a flag; settings are given as --section.setting value."),
        (
            ["--model.path", "@x"],
            "--model.path: not valid YAML: found character '@' that cannot start any token. The value was '@x'; "
            "text with "
            "special characters needs quotes of its own.",
        ),
        (
            ["--runtime.address", "auto"],
            "--runtime.address: runtime.address belongs to kind ray, but runtime is local (the default); set "
            "runtime.kind "
            "to ray, or remove runtime.address.",
        ),
    ],
)
def test_messages_for_flags(write, flags, expected):
    assert message(Path("base.yaml"), *flags) == expected


def test_all_problems_at_once_without_their_consequences(write):
    text = (
        "model: {pth: x}\nreward: {pythn: r.py}\ntrainer: {ranks: none, optim: {lr: fast}}\nrun: {dir: d, seed: -1}\n"
    )
    assert message(write("x.yaml", text), "--data.train.a.path", "m", "--foo.bar", "1") == (
        "x.yaml has 6 problems:\n"
        "  x.yaml:1: there is no setting model.pth; did you mean model.path?\n"
        "  x.yaml:2: there is no setting reward.pythn; did you mean reward.python?\n"
        "  --foo.bar: there is no setting foo; a recipe has: model, data, run, sft, rm, dpo, kd, prm, sample, train, "
        "rollout, reward, method, critic, trainer, runtime, evaluation.\n"
        "  x.yaml:4: run.seed is -1; it must be a whole number >= 0. (Fixes prompts, order, samples and losses.)\n"
        "  x.yaml:3: trainer.ranks is 'none'; it must be a whole number >= 1. (Data-parallel ranks.)\n"
        "  x.yaml:3: trainer.optim.lr is 'fast'; it must be a number > 0. (Peak learning rate.)"
    )


def test_missing_sections(write):
    assert message(write("x.yaml", "model: {path: m}\nreward: {}\n")) == (
        "x.yaml has 3 problems:\n"
        "  x.yaml: data is missing; it must be a mapping with train, eval, prompt, min_seconds, max_seconds, "
        "on_invalid. "
        "(Training and held-out data.)\n"
        "  x.yaml: run is missing; it needs at least run.dir. (Run directory, seed, checkpoints.)\n"
        "  x.yaml:2: reward has no source of scores: set reward.python, reward.terms, reward.services or "
        "reward.models."
    )


def test_missing_files_and_circles(write):
    write("a.yaml", "inherits: b.yaml\n")
    write("b.yaml", "run: {}\ninherits: sub/c.yaml\n")
    write("sub/c.yaml", "inherits: ../a.yaml\n")
    assert message(Path("a.yaml")) == (
        "sub/c.yaml: recipes inherit one another in a circle: a.yaml -> b.yaml -> sub/c.yaml -> a.yaml. "
        "Remove one of the links."
    )
    assert message(write("d.yaml", "inherits: sub/none.yaml\n")) == (
        "d.yaml:1: inherits sub/none.yaml, but there is no file sub/none.yaml."
    )
    assert (
        message(write("d.yaml", "inherits: 3\n")) == "d.yaml:1: inherits must be a file name or a list of file names."
    )
    assert message(Path("none.yaml")) == f"none.yaml: there is no such recipe; the working directory is {Path.cwd()}."
    assert (
        message(write("e.yaml", "# nothing\n")) == "e.yaml: the recipe is empty; it needs at least model, data and run."
    )
    assert message(write("e.yaml", "- a\n")) == "e.yaml:1: a recipe is a mapping of sections (model: ...)."
    assert message(Path(".")).startswith(".: the recipe cannot be read: ")
