"""Turns tokens into text, by bytes. There is one path: the text is the same read token by token, at once, or up to a
stop string.

Each token gives bytes, which depend on nothing but whether it is the first one, since decoders drop the space at the
beginning of a text. Bytes are held back while they may become a character, at most three of them. Bytes that cannot
become one any more are U+FFFD, one for each maximal subpart, as the Unicode standard recommends (version 15, section
3.9) and `bytes.decode` does.

A text without such bytes is that of transformers' own ``decode``. With such bytes it differs for vocabularies with byte
fallback: there one broken byte makes all bytes beside it U+FFFD, even those of characters that a stream has shown.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable
from functools import cache, cached_property
from itertools import takewhile
from typing import Any

from attrs import define, field

_BROKEN = "\N{REPLACEMENT CHARACTER}"  # decoders write it for bytes that are not a character
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # SentencePiece's name of a byte
_NOT_LOCAL = re.compile(rb'"type": ?"(?:BPEDecoder|CTC)"')
_MOST_KNOWN = 2**18  # there are as many pairs of tokens as a model writes
_BY_FORCE = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"  # of transformers
# All but the end, at most seven characters, that `clean_up_tokenization` may change with later text. Of a run of blanks
# it drops at most two; one that it has dropped behind an apostrophe is not there for what follows.
_SETTLED = re.compile(r"(?:[^ ]+|(?! {1,2}(?:' ?)?(?:n(?:'| '? ?)?|[vr])?\Z)(?: ' (?![.?!,])| ))*")


@define(eq=False)
class TokenBytes:
    """The bytes of a tokenizer's tokens, each of which is decoded once, or once behind each token if it matters.

    Args:
        tokenizer: the tokenizer of the model.
        skip: false if special tokens have bytes, too.
    """

    tokenizer: Any
    skip: bool = True
    _known: dict[tuple[int, int | None], bytes] = field(factory=dict, init=False)  # by the token and the one before
    _alone: dict[int, str] = field(factory=dict, init=False)
    _beyond: dict[str, list[tuple[int, str]]] = field(factory=dict, init=False)

    @cached_property
    def cleans(self) -> bool:
        """True if the tokenizer drops spaces before punctuation from whole texts."""
        told, backend = getattr(self.tokenizer, "__dict__", {}), getattr(self.tokenizer, "backend_tokenizer", None)
        is_bpe = backend is not None and type(backend.model).__name__ == "BPE"
        return bool(told.get("clean_up_tokenization_spaces")) and (not is_bpe or bool(told.get(_BY_FORCE)))

    @cached_property
    def _is_local(self) -> bool:
        """True if a token's text does not depend on its neighbours."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        return backend is not None and not (backend.decoder and _NOT_LOCAL.search(backend.decoder.__getstate__()))

    def of(self, token: int, before: int | None) -> bytes:
        """Returns the bytes of ``token`` when it follows the token ``before``. ``None``: ``token`` is the first one
        that has text."""
        key = (token, token if self._is_local and before is not None else before)
        if key not in self._known:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[key] = self._found(*key)
        return self._known[key]

    def beyond(self, mark: str) -> list[tuple[int, str]]:
        """Returns the tokens whose text has ``mark``, or begins with an end of it, and has more than line breaks behind
        that; each with its bytes as characters. ``mark``, of which each character is a byte, ends in ASCII."""
        if mark not in self._beyond:
            named = [token for name, token in self.tokenizer.get_vocab().items() if mark[-1] in name[:-1]]
            ends = [mark[-length:] for length in range(1, len(mark))]
            texts = [(token, self.of(token, token).decode("latin-1")) for token in sorted(named)]
            self._beyond[mark] = [
                (token, text)
                for token, text in texts
                if text.partition(mark)[2].strip("\n")
                or any(text.startswith(end) and text[len(end) :].strip("\n") for end in ends)
            ]
        return self._beyond[mark]

    def _found(self, token: int, before: int | None) -> bytes:
        alone = self._text(token)
        raw = self._raw(token, alone) if _BROKEN in alone or not alone else None
        if raw is not None:
            return raw
        if before is None:
            return alone.encode(errors="replace")
        base, text = self._text(before), self._decode(before, token)
        if not text.startswith(base):  # the decoder changes its earlier text, which is given already
            base = "".join(old for old, _ in takewhile(lambda pair: pair[0] == pair[1], zip(base, text, strict=False)))
        return text[len(base) :].encode(errors="replace")

    def _raw(self, token: int, text: str) -> bytes | None:
        """Returns the bytes of a token that is no text alone, by its name; ``None``: it is no part of a character."""
        name = getattr(self.tokenizer, "convert_ids_to_tokens", lambda _: None)(token) or ""
        if told := _BYTE.fullmatch(name):
            return bytes([int(told[1], 16)]) if text else None
        if not text:
            return bytes([ord(name)]) if len(name) == 1 and "\x7f" < name <= "\xff" else None  # of ByT5
        alphabet = _alphabet()
        raw = bytes(alphabet[one] for one in name) if set(name) <= alphabet.keys() else b""
        return raw if raw.decode(errors="replace") == text else None

    def _text(self, token: int) -> str:
        if token not in self._alone:
            self._alone[token] = self._decode(token)
        return self._alone[token]

    def _decode(self, *token_ids: int) -> str:
        raw = {"clean_up_tokenization_spaces": False} if self.cleans else {}
        return str(self.tokenizer.decode([*token_ids], skip_special_tokens=self.skip, **raw))


@define(eq=False)
class TextDeltas:
    """Turns tokens into text as they come, and holds back the bytes of an unfinished character.

    Args:
        tokens: the bytes of the tokens, which requests may share.
        special_ids: the tokens that give no text.
    """

    tokens: TokenBytes
    special_ids: frozenset[int]
    _before: int | None = field(default=None, init=False)  # the last token that had text
    _utf8: codecs.IncrementalDecoder = field(init=False)
    _held: str = field(default="", init=False)  # text that may still be cleaned up

    def __attrs_post_init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_id: int) -> str:
        """Adds a token, and returns the text that it completed."""
        if token_id in self.special_ids:
            return ""
        found = self.tokens.of(token_id, self._before)
        if found or (self._before is None and self.tokens.of(token_id, token_id)):  # a space that is not written
            self._before = token_id
        return self._cleaned(self._utf8.decode(found))

    def rest(self) -> str:
        """Returns the text that is still held back when the request has ended."""
        return self._cleaned(self._utf8.decode(b"", True), last=True)

    def whole(self, token_ids: Iterable[int]) -> str:
        """Returns the whole text of ``token_ids``, which are added at once."""
        return "".join(map(self.add, token_ids)) + self.rest()

    def _cleaned(self, text: str, *, last: bool = False) -> str:
        if not self.tokens.cleans:
            return text
        text = self._held + text
        settled = text if last else next(_SETTLED.finditer(text))[0]
        self._held = text[len(settled) :]
        return str(self.tokens.tokenizer.clean_up_tokenization(settled))


@cache
def _alphabet() -> dict[str, int]:
    """Returns the byte for each character of GPT-2's vocabulary. Printable characters stand for their own byte;
    characters from 256 on stand for the other bytes."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
