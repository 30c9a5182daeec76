"""What a body would make, counted part by part, is what a reader of letters counts, however the body is cut."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triolet.core.errors import RequestTooLarge
from triolet.server.schemas import weighing
from triolet.server.schemas.weighing import Weighing, check_object, check_texts

TEXTS = st.text('au0,[{:"\\\x01\x7fé😀', max_size=9)
LONG = st.builds(lambda ends, plain: ends[0] + "a" * plain + ends[1], st.tuples(TEXTS, TEXTS), st.integers(0, 60))
FOUND = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)
CUTS = st.lists(st.integers(1, 9), min_size=1, max_size=9)


def is_wide(text: bytes) -> bool:
    escapes = re.findall(rb"\\(u.{4}|.)", text, re.DOTALL)
    return not text.isascii() or any(len(one) == 5 and int(one[1:], 16) >= 128 for one in escapes)


def by_letters(body: bytes) -> tuple[int, int, int]:
    """Values, bytes outside of texts, and bytes of texts that are not plain, by definition."""
    values = beside = wide = 0
    text: bytes | None = None
    escaped = False
    for number in body:
        letter = bytes([number])
        if text is None:
            text = letter if letter == b'"' else None
            beside += text is None
            values += {b",": 1, b":": 8, b"[": 8, b"{": 8}.get(letter, 0)
        elif letter == b'"' and not escaped:
            wide += len(text) if is_wide(text) else 0
            beside, text = beside + 1, None
        else:
            escaped = letter == b"\\" and not escaped
            text += letter
    return values, beside, wide


@given(FOUND, st.booleans(), CUTS)
def test_what_is_counted_is_what_is_there_however_the_body_is_cut(found: object, ascii_: bool, cuts: list[int]) -> None:
    body = json.dumps(found, ensure_ascii=ascii_).encode()
    weighed, rest = Weighing(), body
    while rest:
        cut = cuts[len(rest) % len(cuts)]
        weighed.add(rest[:cut])
        rest = rest[cut:]
    weighed.end()
    assert (weighed.values, weighed.beside, weighed.wide) == by_letters(body)
    assert (weighed.size, weighed.backslashes) == (len(body), body.count(b"\\"))


@given(st.lists(FOUND | LONG, max_size=4), st.booleans(), CUTS)
def test_pieces_of_any_length_are_counted_as_one(found: list[object], ascii_: bool, cuts: list[int]) -> None:
    """A text that goes on for several pieces keeps what its beginning was."""
    body = json.dumps(found, ensure_ascii=ascii_).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weighing, "_PIECE", 5 + cuts[0])  # no escape is longer
        weighed = Weighing()
        weighed.add(body)
        weighed.end()
    assert (weighed.values, weighed.beside, weighed.wide) == by_letters(body)
    assert weighed.backslashes == body.count(b"\\")


@given(st.binary(max_size=40), CUTS)
def test_what_is_no_json_is_counted_without_an_error(body: bytes, cuts: list[int]) -> None:
    weighed = Weighing()
    for start in range(0, len(body), cuts[0]):
        weighed.add(body[start : start + cuts[0]])
    weighed.end()
    assert weighed.size == len(body)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"[" + b"1," * (weighing.MOST_VALUES + 1), "262,144 values"),
        (b'{"a":' * (weighing.MOST_VALUES // 16 + 1), "262,144 values"),
        (b"1" * (weighing.MOST_BESIDE + 1), "4,194,304 bytes outside of texts"),
        (b'"' + b"\\u0430" * (weighing.MOST_WIDE // 6 + 1), "8,388,608 bytes in texts with characters"),
        (b'"' + b"a" * weighing.MOST_WIDE + "é".encode(), "8,388,608 bytes in texts with characters"),
        (b'"' + b"\\n" * (weighing.MOST_BACKSLASHES + 1), "7,340,032 backslashes"),
        (b'"' + b"a" * weighing.MOST_JSON, "33,554,432 bytes"),
    ],
)
def test_a_body_with_too_much_of_something_is_refused_in_words(body: bytes, told: str) -> None:
    weighed = Weighing()
    with pytest.raises(RequestTooLarge, match=told):
        weighed.add(body)
        weighed.end()


@pytest.mark.parametrize("sign", [b"A", b"AAA\\/", b"AA\\u003d"])
def test_plain_texts_may_be_long(sign: bytes) -> None:
    """A picture is one text; PHP writes each slash of base64 with an escape, Gson each =."""
    weighed = Weighing()
    weighed.add(b'{"a":"' + sign * ((weighing.MOST_JSON - 8) // len(sign)) + b'"}')
    weighed.end()
    assert (weighed.values, weighed.wide) == (16, 0)


def test_parts_are_looked_at_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client may send each byte alone. All bytes are counted at once."""
    looked: list[int] = []
    original = Weighing._count
    monkeypatch.setattr(Weighing, "_count", lambda one, piece: looked.append(len(piece)) or original(one, piece))
    weighed = Weighing()
    for _ in range(2 * weighing._PIECE + 1):
        weighed.add(b" ")
    assert (looked, weighed.size) == ([weighing._PIECE] * 2, 2 * weighing._PIECE + 1)
    weighed.end()
    assert looked == [weighing._PIECE, weighing._PIECE, 1]


def test_texts_of_json_have_a_bound_together() -> None:
    one = "[" + "1," * (weighing.MOST_VALUES // 2)
    check_texts("arguments", [one])
    with pytest.raises(RequestTooLarge, match="arguments has more than 262,144 values"):
        check_texts("arguments", [one, one])
    with pytest.raises(RequestTooLarge, match="arguments has more than 262,144 values"):
        check_texts("arguments", ['["and no end', one, one])


@pytest.mark.parametrize(
    ("one", "many", "told"), [("[1,1]", 12, "100 values"), ("11111", 21, "100 bytes outside of texts")]
)
def test_short_texts_of_json_have_a_bound_together(
    one: str, many: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each counts, though none has a whole piece."""
    monkeypatch.setattr(weighing, "MOST_VALUES", 100)
    monkeypatch.setattr(weighing, "MOST_BESIDE", 100)
    check_texts("arguments", [one] * (many - 1))
    with pytest.raises(RequestTooLarge, match=f"arguments has more than {told}"):
        check_texts("arguments", [one] * many)


@pytest.mark.parametrize("found", [[1] * 9, {"a": {"b": [1, 2, {"c": [3, 4, 5]}]}}, ["a" * 21], {"a" * 21: 1}])
def test_an_object_with_too_much_in_it_is_refused(found: object) -> None:
    check_object("tools", [1] * 8, 9, 20)
    with pytest.raises(RequestTooLarge, match="tools has more than 9 values or 20 characters"):
        check_object("tools", found, 9, 20)
