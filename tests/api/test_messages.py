"""Conversations as callers write them: what is taken in which form, and what is told of the others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import triolet
from triolet.api.inputs.messages import Conversation
from triolet.core.errors import InvalidRequest
from triolet.models.architectures.prompts import PARTS, TEXTS, Form, TextPreparer, render_fullest

TEXTS_ALONE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] + '' }}{% endfor %}"
AS_PYTHON = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
PARTS_ALONE = (
    "{% for m in messages %}<{{ m['role'] }}>{% for p in m['content'] %}{{ p['text'] if p['type'] == 'text' else "
    "'[' + p['type'] + ']' }}{% endfor %}{% endfor %}"
)
BOTH = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{{ p['text'] if p['type'] == 'text' else '[' + p['type'] + ']' }}{% endfor %}"
    "{% endif %}{% endfor %}"
)
TEMPLATES = {"texts alone": TEXTS_ALONE, "as Python": AS_PYTHON, "parts alone": PARTS_ALONE, "both": BOTH}


class Tokenizer(SimpleNamespace):
    """With a chat template, as transformers' have it."""

    def apply_chat_template(self, messages: Any, *, chat_template: str | None, **_: Any) -> str:
        return compiled(chat_template or self.chat_template).render(messages=messages)

    def get_chat_template(self, chat_template: str | None, **_: Any) -> str:
        return chat_template or self.chat_template


compiled = functools.cache(jinja2.Template)


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def said_in(content: list[dict[str, str]]) -> list[str]:
    return [part["text"] for part in content]


WORDS = st.text("abc ", min_size=1, max_size=5).filter(str.strip)
CONTENTS = WORDS | st.lists(WORDS, min_size=1, max_size=3).map(lambda texts: parts(*texts))
CONVERSATIONS = st.lists(st.fixed_dictionaries({"role": st.sampled_from("us"), "content": CONTENTS}), min_size=1)


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("forms", [TEXTS, PARTS], ids=["text", "media"])
@given(messages=CONVERSATIONS)
@settings(max_examples=50)
def test_every_text_is_told_whatever_the_template_knows(
    template: str, forms: tuple[Form, ...], messages: list[dict[str, Any]]
) -> None:
    """And never as Python writes a list."""
    rendered = render_fullest(Tokenizer(chat_template=template), messages, forms)
    for content in (message["content"] for message in messages):
        assert all(text in rendered for text in ([content] if isinstance(content, str) else said_in(content)))
    assert "{" not in rendered


def test_parts_of_text_are_joined_by_line_ends_for_templates_of_texts() -> None:
    """Templates that read parts themselves get them as they are, as transformers gives them."""
    messages = [{"role": "user", "content": parts("one ", "two")}, {"role": "user", "content": "three"}]
    for template, expected in (
        (TEXTS_ALONE, "<user>one \ntwo<user>three"),
        (BOTH, "<user>one two<user>three"),
        (PARTS_ALONE, "<user>one two<user>three"),
        (BOTH.replace("m['content']", "m.content"), "<user>one two<user>three"),
    ):
        preparer = TextPreparer(tokenizer=Tokenizer(chat_template=template))
        assert preparer.render(messages) == expected


def test_images_stay_where_they_are_among_the_texts() -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [*parts("see"), {"type": "image"}, *parts("?")]},
    ]
    rendered = render_fullest(Tokenizer(chat_template=PARTS_ALONE), messages, PARTS)
    assert rendered == "<system>be brief<user>see[image]?"


def test_a_template_that_leaves_a_text_out_on_purpose_gets_the_conversation_as_it_was_meant() -> None:
    """As those that drop what was thought in earlier turns."""
    template = "{% for m in messages %}{{ m['content'].split('</think>')[-1] }};{% endfor %}"
    messages = [{"role": "a", "content": "hm</think>yes"}, {"role": "u", "content": parts("and", "now?")}]
    assert render_fullest(Tokenizer(chat_template=template), messages, TEXTS) == "yes;and\nnow?;"


def test_what_every_form_is_refused_for_is_told_of_the_first() -> None:
    template = "{{ messages[0].nothing.at_all }}"
    with pytest.raises(InvalidRequest, match="chat template refuses the messages: UndefinedError"):
        render_fullest(Tokenizer(chat_template=template), [{"role": "u", "content": parts("hi")}], TEXTS)


# -- what is told ----------------------------------------------------------------------------------------------------


def said(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ("hi", r"messages='hi'; allowed: a list of \{'role': 'user', 'content': a text, or a list of parts\}"),
        ({"role": "user", "content": "hi"}, r"messages=\{'role': .*; allowed: a list of"),
        (5, "messages=5; allowed: a list of"),
        (["hi"], r"message 1 of 1 is 'hi'; allowed: \{'role'"),
        ([{"content": "hi"}], r"message 1 of 1 has no role; allowed: .* most chat templates know system, user and"),
        ([*said("hi"), {"role": 3, "content": "hi"}], "message 2 of 2 has role=3; allowed"),
        ([{"role": "user"}], "message 1 of 1 has no content; allowed"),
        (said(None), "message 1 of 1 has no content; allowed"),
        (said(3), r"message 1 of 1 has content=3; allowed: a text, or a list of parts: \{'type': 'text'"),
        (said(["hi"]), r"part 1 of message 1 of 1 is 'hi'; allowed: \{'type': 'text', 'text'"),
        (said([{"text": "hi"}]), "part 1 of message 1 of 1 has no type; allowed"),
        (said([*parts("hi"), {"type": "text"}]), "part 2 of message 1 of 1 has text=None; allowed: a text"),
        (said([{"type": "image_url", "image_url": {"url": "https://a.b"}}]), "'image_url'; URLs are not fetched"),
        (said([{"type": "image", "url": "https://a.b"}]), "is of type 'image' and has url, but no 'image'; allowed"),
        (said([{"type": "input_audio", "input_audio": {}}]), "of type 'input_audio'; give a path, bytes or an array"),
        (said([{"type": "video"}]), "of type 'video'; videos are not read"),
        (said([{"type": "smell"}]), r"of type 'smell'; allowed: \{'type': 'text', 'text'"),
    ],
)
def test_what_is_no_conversation_is_told_by_its_place(messages: Any, told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        Conversation.of(messages)


@pytest.mark.parametrize(
    "messages",
    [
        None,
        said("hi"),
        tuple(said("")),
        said([]),
        said([{"type": "image"}, {"type": "image", "image": b""}, {"type": "audio", "audio": None}, *parts("hi")]),
        [{"role": "assistant", "content": None, "tool_calls": []}, {"role": "tool", "content": "5", "name": "add"}],
    ],
)
def test_a_conversation_is_taken(messages: Sequence[Any] | None) -> None:
    assert len(Conversation.of(messages).messages) == len(messages or ())


def test_images_and_audio_are_taken_out_in_their_order() -> None:
    content = [{"type": "image", "image": 1}, *parts("and"), {"type": "audio", "audio": 2}, {"type": "image"}]
    found = Conversation.of(said(content))
    assert found.media == [("image", 1), ("audio", 2)]
    assert (found.texts, found.types) == (["and"], {"image", "audio", "text"})
    assert found.messages == said([{"type": "image"}, *parts("and"), {"type": "audio"}, {"type": "image"}])
    assert content[0] == {"type": "image", "image": 1}


async def test_a_model_of_text_takes_parts_of_text(made: Callable[[str], Path]) -> None:
    async with triolet.Engine(made("llama")) as engine:
        plain = await engine.generate(messages=said("hi you"), max_tokens=3)
        in_parts = await engine.generate(messages=said(parts("hi ", "you")), max_tokens=3)
        assert (in_parts.token_ids, in_parts.usage) == (plain.token_ids, plain.usage)
