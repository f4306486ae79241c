"""A text task that a model of 0.1M parameters learns by reinforcement in a minute, written on the spot.

    python -m skirl.testing.tiny_task runs/tiny-text      # model/ (a random Qwen3), prompts.jsonl, and more rows

Each prompt names a digit ("say 3"), and the perfect response is that digit over and over. So the score is verifiable,
graded, and depends on the prompt: a policy that writes the same to every prompt cannot pass 1 / ``NUM_DIGITS``.

For the offline commands there are rows of every form (``tiny_rows``) in <form>.jsonl, those of other phrases in
<form>-held-out.jsonl: conversations (sft, kd), pairs (rm, dpo), labelled (kto), steps (prm).
"""

import argparse
import json
import string
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

__all__ = ["FORMS", "NUM_DIGITS", "RESPONSE_LENGTH", "tiny_prompts", "tiny_rows", "tiny_task", "tiny_tokenizer"]

NUM_DIGITS = 4
"""Digits that the prompts name: 0, 1, ..."""
RESPONSE_LENGTH = 16
"""Digits of a perfect response."""

Form = Literal["conversations", "pairs", "labelled", "steps"]
FORMS: tuple[Form, ...] = ("conversations", "pairs", "labelled", "steps")
"""Rows of the offline commands."""
SHORT = 4
"""Digits of a response in these."""

_NUM_TRAINED = 6
_PHRASES = ("say {}", "use {}", "do {}", "a {}", "{} now", "{} too", "{} ok", "{} up")
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unknown|>")
_VOCABULARY = 64
_TEMPLATE = (  # other roles are left out: each character is a token, and short prompts are learned sooner
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ '<|im_start|>' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}"
)


def tiny_task(directory: Path, *, seed: int = 0) -> None:
    """Writes ``model/``, ``prompts.jsonl`` and rows of all ``FORMS``; what is there is replaced. Equal seeds give equal
    files.

    Args:
        directory: made if missing.
        seed: of the random weights.
    """
    _write_model(directory / "model", seed)
    _write_rows(directory / "prompts.jsonl", tiny_prompts())
    for form in FORMS:
        _write_rows(directory / f"{form}.jsonl", tiny_rows(form))
        _write_rows(directory / f"{form}-held-out.jsonl", tiny_rows(form, held_out=True))


def _write_rows(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def tiny_prompts() -> list[dict[str, str]]:
    """Rows {"id", "prompt", "answer"}; every digit in every phrase."""
    return [
        {
            "id": f"{number}-{digit}",
            "prompt": phrase.format(digit),
            "answer": str(digit) * RESPONSE_LENGTH,
        }
        for number, phrase in enumerate(_PHRASES)
        for digit in range(NUM_DIGITS)
    ]


def tiny_rows(form: Form, *, held_out: bool = False) -> list[dict[str, Any]]:
    """Rows of the offline commands, of the first phrases, or of the others. Responses are ``SHORT`` digits long."""
    phrases = _PHRASES[_NUM_TRAINED:] if held_out else _PHRASES[:_NUM_TRAINED]
    return [
        {"id": f"{number}-{digit}", **_MAKERS[form](phrases, number, digit)}
        for number in range(len(phrases))
        for digit in range(NUM_DIGITS)
    ]


def _conversation(phrases: Sequence[str], number: int, digit: int) -> dict[str, Any]:
    """Two questions, each with its answer."""
    asked = ((phrases[number], digit), (phrases[(number + 1) % len(phrases)], (digit + 1) % NUM_DIGITS))
    turns = [
        turn
        for phrase, wanted in asked
        for turn in (
            {"role": "user", "content": phrase.format(wanted)},
            {"role": "assistant", "content": str(wanted) * SHORT},
        )
    ]
    return {"messages": turns}


def _pair(phrases: Sequence[str], number: int, digit: int) -> dict[str, Any]:
    wrong = (digit + 1 + number % (NUM_DIGITS - 1)) % NUM_DIGITS
    prompt, chosen, rejected = phrases[number].format(digit), str(digit) * SHORT, str(wrong) * SHORT
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, "margin": 1.0}


def _labelled(phrases: Sequence[str], number: int, digit: int) -> dict[str, Any]:
    label = (number + digit) % 2 == 0
    made = _pair(phrases, number, digit)
    return {"prompt": made["prompt"], "response": made["chosen" if label else "rejected"], "label": label}


def _steps(phrases: Sequence[str], number: int, digit: int) -> dict[str, Any]:
    """The right digit, and then from some step on a wrong one."""
    labels = [step <= (number + digit) % 3 for step in range(3)]
    wrong = (digit + 1) % NUM_DIGITS
    prompt = phrases[number].format(digit)
    return {"prompt": prompt, "steps": [str(digit if right else wrong) * 2 for right in labels], "labels": labels}


_MAKERS: Mapping[str, Callable[[Sequence[str], int, int], dict[str, Any]]] = {
    "conversations": _conversation,
    "pairs": _pair,
    "labelled": _labelled,
    "steps": _steps,
}


def tiny_tokenizer() -> Any:
    """One token a character: 64 in all, each of which a response may hold; ChatML's template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = ("\n", " ", *string.ascii_lowercase, *string.digits, *string.punctuation)
    vocabulary = {text: number for number, text in enumerate((*_SPECIAL, *characters)[:_VOCABULARY])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token=_SPECIAL[3]))
    words.pre_tokenizer = pre_tokenizers.Split(  # pyright: ignore[reportAttributeAccessIssue]
        Regex("[\\s\\S]"), behavior="isolated"
    )
    words.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token=_SPECIAL[3],
        additional_special_tokens=["<|im_start|>"],
        chat_template=_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _write_model(directory: Path, seed: int) -> None:
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    from skirl.models.loading import quiet_transformers

    tokenizer = tiny_tokenizer()
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    config = Qwen3Config(
        vocab_size=_VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=end,
        bos_token_id=None,
        initializer_range=0.04,  # learns sooner than from the usual 0.02
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=[end, pad], pad_token_id=pad, do_sample=False)
    with quiet_transformers():
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m skirl.testing.tiny_task", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("directory", type=Path, help="where model/, prompts.jsonl and the other rows go")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights")
    options = parser.parse_args(arguments)
    tiny_task(options.directory, seed=options.seed)
    sys.stdout.write(f"wrote {options.directory / 'model'}, prompts.jsonl and rows of {', '.join(FORMS)} beside it\n")


if __name__ == "__main__":
    main()
