"""Local reward models: transformers' own scores, whatever shares a row; failures by text; standardised scores."""

import json
from pathlib import Path

import pytest
import torch

from skirl.config.rewards import RewardModelConfig
from skirl.errors import ModelError
from skirl.models.loading import export_model
from skirl.models.reward_model import RewardModel, reward_text_ids
from skirl.models.value import ValueModel, load_value_model
from skirl.records import RewardText, ScoreFailure

CPU = torch.device("cpu")


def text(prompt, response):
    return RewardText(({"role": "user", "content": prompt},), response)


TEXTS = (text("2 + 2?", "4"), text("hello", "a much longer answer than the others"), text("hello", ""), text("x", "yz"))


@pytest.fixture(scope="module", params=["tied", "untied"])
def foreign(request, checkpoints, tmp_path_factory):
    """As somebody else's trainer leaves it: transformers' own classes and writers."""
    import transformers

    directory = tmp_path_factory.mktemp("foreign") / request.param
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoints[request.param])
    torch.manual_seed(1)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        checkpoints[request.param], num_labels=1, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def own(checkpoints, tmp_path_factory):
    """As ``skirl rm`` leaves it."""
    loaded = load_value_model(checkpoints["tied"], kind="sequence", dtype="float32")
    model = ValueModel(loaded, None, reads="at")
    torch.manual_seed(2)
    torch.nn.init.normal_(model.head.weight)
    model.scalar_head.set_scores(0.5, 4.0)
    directory = tmp_path_factory.mktemp("own") / "rm"
    export_model(loaded, {n: p.detach() for n, p in model.named_model_parameters()}, directory, "same")
    return directory


@pytest.fixture(scope="module")
def steps(checkpoints, tmp_path_factory):
    """As ``skirl prm`` leaves it: read after each line."""
    loaded = load_value_model(checkpoints["tied"], kind="token", dtype="float32")
    model = ValueModel(loaded, None, reads="at")
    torch.manual_seed(3)
    torch.nn.init.normal_(model.head.weight)
    model.scalar_head.separator = "\n"
    directory = tmp_path_factory.mktemp("steps") / "prm"
    export_model(loaded, {n: p.detach() for n, p in model.named_model_parameters()}, directory, "same")
    return directory


def transformers_score(directory, ids):
    import transformers

    model = transformers.AutoModelForSequenceClassification.from_pretrained(directory).eval()
    with torch.no_grad():
        return float(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, 0])


def scorer(directory, **settings):
    return RewardModel(RewardModelConfig(path=directory, **settings), CPU)


def edited(source, directory, **config):
    import shutil

    shutil.copytree(source, directory)
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return directory


def test_scores_are_those_of_transformers_on_each_text_alone(foreign):
    model = scorer(foreign)
    got = model.scores(TEXTS)
    for one, score in zip(TEXTS, got, strict=True):
        ids = reward_text_ids(model._tokenizer, one, form="chat", end=None)
        assert score == pytest.approx(transformers_score(foreign, ids), abs=1e-5)
    assert len({round(float(score), 4) for score in got}) == len(TEXTS)


def test_neighbours_in_a_row_do_not_matter(foreign):
    together = scorer(foreign).scores(TEXTS)
    alone = [scorer(foreign).scores([one])[0] for one in TEXTS]
    in_small_batches = scorer(foreign, max_tokens_per_batch=110).scores(TEXTS)
    assert together == pytest.approx(alone, abs=1e-5)
    assert together == pytest.approx(in_small_batches, abs=1e-5)
    assert scorer(foreign).scores([]) == []


def test_a_text_over_the_cap_fails_alone(foreign):
    whole = scorer(foreign).scores(TEXTS)
    found = scorer(foreign, max_tokens_per_batch=60).scores(TEXTS)
    assert isinstance(found[1], ScoreFailure)
    assert found[1].kind == "too_long"
    assert "which takes 60 at once" in found[1].message
    assert [found[i] for i in (0, 2, 3)] == pytest.approx([whole[i] for i in (0, 2, 3)], abs=1e-5)


def test_rows_never_exceed_the_cap(foreign):
    model = scorer(foreign, max_tokens_per_batch=100)
    ids = {i: [0] * n for i, n in enumerate((90, 40, 40, 30, 60, 100, 1))}
    batches = list(model._batches(ids))
    assert sorted(i for batch in batches for i in batch) == sorted(ids)
    assert all(sum(len(ids[i]) for i in batch) <= 100 for batch in batches)


def test_own_exports_are_read_as_they_were_trained(own):
    """Up to where the answer starts, the answer, the end token: not the line break with which ChatML closes a turn."""
    model = scorer(own, standardize=False)
    tokenizer = model._tokenizer
    for one, score in zip(TEXTS, model.scores(TEXTS), strict=True):
        rendered = f"<|im_start|>user\n{one.messages[0]['content']}<|im_end|>\n<|im_start|>assistant\n{one.response}"
        ids = tokenizer(rendered)["input_ids"] + [tokenizer.eos_token_id]
        assert score == pytest.approx(transformers_score(own, ids), abs=1e-5)


@pytest.mark.parametrize(
    ("response", "lines"),
    [
        ("Add them.\nSo 4.", ["Add them.\n", "So 4.\n"]),
        ("Add them.\n\n  \nSo 4.\n", ["Add them.\n", "So 4.\n"]),
        ("4", ["4\n"]),
        ("", ["\n"]),
    ],
)
def test_a_process_reward_model_is_read_where_its_last_step_ends(steps, response, lines):
    """At the separator, as it was trained, which a response does not end with."""
    import transformers

    plain = transformers.AutoModelForTokenClassification.from_pretrained(steps).eval()
    model = scorer(steps)
    ids = model._tokenizer("<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    for line in lines:
        ids += model._tokenizer(line)["input_ids"]
    with torch.no_grad():
        wanted = float(plain(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1, 0])
    assert model.scores([text("2 + 2?", response)]) == pytest.approx([wanted], abs=1e-5)


def test_a_number_at_every_token_and_no_word_of_which_one_counts(steps, tmp_path):
    file = edited(steps, tmp_path / "critic") / "config.json"
    config = json.loads(file.read_text())
    assert config.pop("skirl_step_separator") == "\n"
    file.write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"critic gives a number at every token .* it is a critic.*skirl prm"):
        scorer(tmp_path / "critic")


def test_scores_are_standardised_by_what_the_checkpoint_stores(own, foreign):
    raw, standard = (scorer(own, standardize=s).scores(TEXTS) for s in (False, True))
    assert standard == pytest.approx([(score - 0.5) / 4 for score in raw])
    assert scorer(foreign, standardize=False).scores(TEXTS) == scorer(foreign, standardize=True).scores(TEXTS)


def test_a_pad_token_at_the_end_is_not_read(foreign, tmp_path):
    """Where end and pad token are one, transformers reads the token before; so do we."""
    import transformers

    directory = edited(foreign, tmp_path / "copy", pad_token_id=198)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    newline = tokenizer("\n")["input_ids"][-1]
    directory = edited(foreign, tmp_path / "pad", pad_token_id=newline)
    model = scorer(directory)
    ids = reward_text_ids(model._tokenizer, TEXTS[0], form="chat", end=None)
    assert ids[-1] == newline
    assert model.scores(TEXTS[:1])[0] == pytest.approx(transformers_score(directory, ids), abs=1e-5)
    assert model.scores(TEXTS[:1])[0] != pytest.approx(scorer(foreign).scores(TEXTS[:1])[0], abs=1e-4)


def test_a_template_that_refuses_turns_is_a_failure_of_that_text(foreign, tmp_path):
    directory = edited(foreign, tmp_path / "copy")
    file = directory / "chat_template.jinja"
    refusal = "{% if messages[0].role == 'system' %}{{ raise_exception('no system turns') }}{% endif %}"
    file.write_text(refusal + file.read_text())
    system = RewardText(({"role": "system", "content": "s"}, {"role": "user", "content": "u"}), "r")
    first, second = scorer(directory).scores([system, TEXTS[0]])
    assert isinstance(first, ScoreFailure)
    assert (first.kind, "no system turns" in first.message) == ("raised", True)
    assert second == pytest.approx(scorer(foreign).scores(TEXTS[:1])[0], abs=1e-5)


def test_scores_that_are_not_finite_fail(own, tmp_path):
    from safetensors.torch import load_file, save_file

    directory = edited(own, tmp_path / "nan")
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tensors["score.weight"].fill_(float("nan"))
    save_file(tensors, file, metadata={"format": "pt"})
    (failure,) = scorer(directory).scores(TEXTS[:1])
    assert isinstance(failure, ScoreFailure)
    assert failure.kind == "not_finite"


def test_what_cannot_score(checkpoints, foreign, tmp_path):
    with pytest.raises(ModelError, match="has no scalar head"):
        scorer(checkpoints["tied"])
    directory = edited(foreign, tmp_path / "copy")
    Path(directory / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match="has no chat template"):
        scorer(directory)
    audio = load_value_model(checkpoints["native"], kind="token", dtype="float32")
    named = {n: p.detach() for n, p in audio.model.named_parameters()}
    export_model(audio, named, tmp_path / "audio", "same")
    with pytest.raises(ModelError, match="hears audio"):
        scorer(tmp_path / "audio")


def test_half_precision_weights_give_float32_scores(own):
    scores = scorer(own, dtype="bfloat16").scores(TEXTS)
    assert scores == pytest.approx(scorer(own).scores(TEXTS), abs=0.2)
