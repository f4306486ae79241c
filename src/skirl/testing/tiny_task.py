"""A text task that a model of 0.1M parameters learns by reinforcement in a minute, written on the spot.

    python -m skirl.testing.tiny_task runs/tiny-text      # model/ (a random Qwen3) and prompts.jsonl

Each prompt names a digit ("say 3"), and the perfect response is that digit over and over. So the score is verifiable,
graded, and depends on the prompt: a policy that writes the same to every prompt cannot pass 1 / ``NUM_DIGITS``.
"""

import argparse
import json
import string
import sys
from pathlib import Path
from typing import Any

__all__ = ["NUM_DIGITS", "RESPONSE_LENGTH", "tiny_prompts", "tiny_task", "tiny_tokenizer"]

NUM_DIGITS = 4
"""Digits that the prompts name: 0, 1, ..."""
RESPONSE_LENGTH = 16
"""Digits of a perfect response."""

_PHRASES = ("say {}", "use {}", "do {}", "a {}", "{} now", "{} too", "{} ok", "{} up")
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unknown|>")
_VOCABULARY = 64
_TEMPLATE = (  # roles are left out: each character is a token, and short prompts are learned sooner
    "{% for message in messages %}{{ message['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}"
)


def tiny_task(directory: Path, *, seed: int = 0) -> None:
    """Writes ``model/`` and ``prompts.jsonl``; what is there is replaced. Equal seeds give equal files.

    Args:
        directory: made if missing.
        seed: of the random weights.
    """
    _write_model(directory / "model", seed)
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in tiny_prompts())
    (directory / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")


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
    parser.add_argument("directory", type=Path, help="where model/ and prompts.jsonl go")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights")
    options = parser.parse_args(arguments)
    tiny_task(options.directory, seed=options.seed)
    sys.stdout.write(f"wrote {options.directory / 'model'} and {options.directory / 'prompts.jsonl'}\n")


if __name__ == "__main__":
    main()
