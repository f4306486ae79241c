"""A critic reads the policy's ids: which checkpoints may, and what is told of the others."""

import json
import shutil
from pathlib import Path

import pytest

from skirl.errors import ModelError
from skirl.models.loading import load_tokenizer_and_family
from skirl.models.vocabulary import check_critic
from skirl.testing.tiny_task import tiny_task


def told(policy: Path, critic: Path) -> str:
    with pytest.raises(ModelError) as caught:
        check_critic(critic, load_tokenizer_and_family(policy), policy)
    return str(caught.value)


@pytest.mark.parametrize(("policy", "critic"), [("tied", "untied"), ("tied", "moe"), ("native", "original")])
def test_critics_of_the_same_tokens_may_be_of_another_architecture(checkpoints, policy, critic):
    check_critic(checkpoints[critic], load_tokenizer_and_family(checkpoints[policy]), checkpoints[policy])


def test_a_critic_of_other_tokens_is_refused(checkpoints, tmp_path):
    tiny_task(tmp_path)
    critic, policy = tmp_path / "model", checkpoints["tied"]
    number = len(load_tokenizer_and_family(policy).tokenizer.get_vocab())
    assert told(policy, critic).startswith(
        f"critic.path: {critic} does not read the policy's tokens ({policy}): {number} of {number} have another id "
        "there or none, such as "
    )


def test_more_tokens_do_no_harm_and_fewer_do(checkpoints):
    """Qwen3-ASR knows all of the text model's tokens, and some for clips."""
    text, speech = checkpoints["tied"], checkpoints["native"]
    check_critic(speech, load_tokenizer_and_family(text), text)
    assert told(speech, text).startswith(
        f"critic.path: {text} is a causal language model and the policy ({speech}) Qwen3-ASR, whose clips it does not "
        "hear: use a critic of the policy's family, or leave critic.path out"
    )


def test_a_critic_with_too_few_embeddings_is_refused(checkpoints, tmp_path):
    policy, critic = checkpoints["tied"], shutil.copytree(checkpoints["tied"], tmp_path / "critic")
    file = critic / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | {"vocab_size": 9}), encoding="utf-8")
    assert f"critic.path: {critic} has embeddings of 9 tokens, and the policy" in told(policy, critic)
