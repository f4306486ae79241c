"""Conversations as token ids and spans to learn from, against pieces joined by hand."""

import random
from types import SimpleNamespace
from typing import Any

import pytest

from skirl.errors import DataError
from skirl.models.families import TEXT
from skirl.models.loading import load_tokenizer_and_family
from skirl.records import Row
from skirl.rollouts.render import Renderer
from skirl.testing.tiny_task import tiny_tokenizer
from tests import tiny

START, END, STOP = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
LINES = (  # ChatML: a line break follows the end token, and no policy ever writes it
    "{% for m in messages %}<|im_start|>{{ m['role'] + '\\n' + m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OPENED = (  # the next turn's first token ends the answer before it
    "{% for m in messages %}{{ '<|endoftext|>' if m['role'] == 'user' else '<|im_start|>' }}{{ m['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
REWRITES = (  # the last answer is shown in another way than the earlier ones
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<|im_start|>{{ '!' if loop.last else '' }}{% endif %}"
    "{{ m['content'] }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
ENDLESS = (
    "{% for m in messages %}{{ m['role'][0] + m['content'] }}\n{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)
STRICT = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turn') }}{% endif %}" + LINES

Pieces = list[tuple[str, bool]]
"""Text, and whether it is learned."""


def renderer(template: str | None = None) -> Renderer:
    """The tiny text model's, whose tokens are characters; with its own template or another."""
    tokenizer = tiny_tokenizer()
    tokenizer.name_or_path = "tiny"
    if template is not None:
        tokenizer.chat_template = template or None
    return Renderer(TEXT, tokenizer, SimpleNamespace(), forced=False, num_samples=lambda media, least: 0)


def by_hand(pieces: Pieces) -> tuple[tuple[int, ...], tuple[int, ...]]:
    tokenizer = tiny_tokenizer()
    ids: list[int] = []
    positions: list[int] = []
    for text, learned in pieces:
        own = tokenizer(text, add_special_tokens=False)["input_ids"]
        positions += range(len(ids), len(ids) + len(own)) if learned else ()
        ids += own
    return tuple(ids), tuple(positions)


def turns(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    """User and assistant in turn."""
    made = [{"role": "assistant" if n % 2 else "user", "content": text} for n, text in enumerate(contents)]
    return made if system is None else [{"role": "system", "content": system}, *made]


def rendered(made: Renderer, *args: Any, **kwargs: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    found = made.conversation(*args, **kwargs)
    return found.ids, found.positions


FOUR = turns("say 0", "00", "use 1", "11")
CASES: list[tuple[str | None, list[dict[str, str]], dict[str, Any], Pieces]] = [
    (None, FOUR, {}, [
        ("say 0" + END + START, False), ("00" + END, True), ("use 1" + END + START, False), ("11" + END, True),
    ]),
    (None, FOUR, {"learn_from": 3}, [("say 0" + END + START + "00" + END + "use 1" + END + START, False),
                                     ("11" + END, True)]),
    (None, turns("say 0", "00"), {}, [("say 0" + END + START, False), ("00" + END, True)]),
    (None, turns("say 0", ""), {}, [("say 0" + END + START, False), (END, True)]),
    (None, turns("say 0", "00", "and"), {}, [("say 0" + END + START, False), ("00" + END, True)]),
    (LINES, FOUR, {}, [
        (f"{START}user\nsay 0{END}\n{START}assistant\n", False), ("00" + END, True),
        (f"\n{START}user\nuse 1{END}\n{START}assistant\n", False), ("11" + END, True),
    ]),
    (LINES, turns("a", "b", "c", "d", "e", "f", system="be"), {"learn_from": 4}, [
        (f"{START}system\nbe{END}\n{START}user\na{END}\n{START}assistant\nb{END}\n{START}user\nc{END}\n"
         f"{START}assistant\n", False), ("d" + END, True),
        (f"\n{START}user\ne{END}\n{START}assistant\n", False), ("f" + END, True),
    ]),
    (OPENED, FOUR, {"end_ids": (0,)}, [
        (STOP + "say 0" + START, False), ("00", True), (STOP, True), ("use 1" + START, False), ("11" + END, True),
    ]),
    ("", turns("say 0", "00"), {}, [("say 0", False), ("00" + END, True)]),
]  # fmt: skip


@pytest.mark.parametrize(("template", "conversation", "how", "pieces"), CASES)
def test_ids_and_spans_are_those_made_by_hand(template, conversation, how, pieces):
    assert rendered(renderer(template), conversation, where="x", **how) == by_hand(pieces)


def test_any_number_of_turns_of_any_length():
    """What is learned is, in order, each answer and its end token; all ids together are the template's text."""
    draw, made, tokenizer = random.Random(0), renderer(LINES), tiny_tokenizer()
    for _ in range(50):
        texts = ["".join(draw.choices("ab \n12", k=draw.randint(1, 9))) for _ in range(2 * draw.randint(1, 5))]
        ids, positions = rendered(made, turns(*texts))
        learned = tokenizer.decode([ids[p] for p in positions])
        assert learned == "".join(answer + END for answer in texts[1::2])
        tokenizer.chat_template = LINES
        whole = tokenizer.apply_chat_template(turns(*texts), tokenize=False)
        assert tokenizer.decode(ids) + "\n" == whole


def test_an_answer_is_tokenised_as_it_is_sampled(checkpoints):
    """After the prompt's own tokens, and not merged with them: the byte tokenizer would join two line breaks."""
    files = load_tokenizer_and_family(checkpoints["tied"])
    made = tiny.renderer_of(files)
    conversation = turns("one", "\n\ntwo", "three", "\n four")
    ids, positions = rendered(made, conversation)
    prompt = made.prompt(Row("1", "s", messages=tuple(conversation[:1])))
    assert ids[: len(prompt.input_ids)] == prompt.input_ids
    answer = tuple(files.tokenizer("\n\ntwo", add_special_tokens=False)["input_ids"])
    end = files.tokenizer.eos_token_id
    assert ids[len(prompt.input_ids) :][: len(answer) + 1] == (*answer, end)
    assert positions[: len(answer) + 1] == tuple(range(len(prompt.input_ids), len(prompt.input_ids) + len(answer) + 1))
    context = made.prompt(Row("1", "s", messages=tuple(conversation[:3])))
    last = rendered(made, conversation, learn_from=3)
    assert last[0][: len(context.input_ids)] == context.input_ids
    assert last[1][0] == len(context.input_ids)


def test_steps_end_at_their_last_token():
    made = renderer().steps(turns("say 0"), ["00\n", "1\n"], "x")
    ids, _ = by_hand([("say 0" + END + START + "00\n1\n", False)])
    start = len("say 0") + 2
    assert (made.ids, made.positions) == (ids, (start + 2, start + 4))


def test_a_template_that_rewrites_earlier_turns_is_refused_by_name():
    with pytest.raises(DataError, match=r"a\.jsonl:7: the chat template of tiny rewrites earlier turns once turn 3"):
        renderer(REWRITES).conversation(FOUR, where="a.jsonl:7")
    assert rendered(renderer(REWRITES), FOUR, learn_from=3)[1]  # the last answer alone needs no such promise


@pytest.mark.parametrize(
    ("template", "conversation", "message"),
    [
        (ENDLESS, FOUR, r"a:1: the chat template of tiny closes an answer without an end token \(<\|im_end\|>\)"),
        (LINES, turns("say", f"0{END}1"), r"a:1: turn 1 holds '<\|im_end\|>', which ends a turn"),
        ("", FOUR, r"a:1: tiny has no chat template, so a conversation with several answers"),
        (STRICT, turns("a", "b", system="s"), r"a:1: the chat template of tiny refuses turns of system, user: no syst"),
    ],
)
def test_what_cannot_be_learned_from_is_refused(template, conversation, message):
    with pytest.raises(DataError, match=message):
        renderer(template).conversation(conversation, where="a:1")
