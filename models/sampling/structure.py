"""Structured output: the tokens that may come next if the whole text is to follow a `Structure`.

The work is done by llguidance (https://github.com/guidance-ai/llguidance), which parses grammars on tokens. The package
is imported with the first structure.

::

    Structure -> grammar.py        (a process with limits)        a bad one is its caller's InvalidRequest: `Tried`
              -> Grammars.compile  (any thread)                   compiled once, and given to its request: `Compiled`
              -> Grammars.guide    (the executor's thread)        copied for each sequence
              -> Guide.allowed     (each token)                   bits of the tokens that may come next

Each call of a guide names all tokens sampled so far, whatever earlier calls named. The guide takes back draft tokens
that were rejected, and reads the new ones. So replayed sequences and several draft tokens in one step need no special
care. `Guide.valid` returns how many draft tokens the structure allows.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

from ...core.errors import CheckpointError, InvalidRequest
from ...core.request import Structure
from .grammar import LIMITS, grammar_of, judged

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_SILENT = 0  # llguidance's log level
_PLAIN = (  # for llguidance's words, which name no reason, or advise what cannot be done here
    (
        r"NoExtensionBias",
        "no text that it allows can end, since a schema or a rule only refers to itself; give a choice",
    ),
    (
        r".*Current row has (\d+) items; max is (\d+).*",
        r"\1 parts may follow at one place; allowed: \2. Use fewer members",
    ),
    (r"Unimplemented keys: \[(.*)\]", r"it has keywords that cannot be forced: \1; leave them out"),
    (r"oneOf constraints are not supported.*", "more than one case of a oneOf may fit a value; write anyOf"),
)
_CANNOT = "the structure cannot be followed"
_LEAST = 2**16  # bytes that a kept grammar counts at least


def fault_of(structure: Structure) -> str:
    """Returns the reason why ``structure`` cannot be followed, as far as it is known without a model, else an empty
    text. Neither time nor memory are limited: see `grammar` for structures of strangers.

    The fault is returned, not raised, since an error that leaves one of trio's threads is part of a reference cycle."""
    try:
        fault, _ = judged(_grammar(structure))
    except InvalidRequest as error:
        return str(error)
    return str(bad(structure, fault)) if fault else ""


def is_complete(structure: Structure, text: str) -> bool:
    """True if ``text`` is all of what ``structure`` describes; a text that ended early may be only its beginning."""
    from llguidance import LLTokenizer

    tokens = LLTokenizer("byte")
    matcher = _matcher(tokens, _grammar(structure))
    return matcher.consume_tokens(tokens.tokenize_bytes(text.encode())) and matcher.is_accepting()


def writes(structure: Structure, mark: str) -> bool:
    """True if ``structure`` has texts that begin with ``mark`` because it names the mark, rather than any text."""
    from llguidance import LLTokenizer

    tokens, other = LLTokenizer("byte"), "q" if mark[-1] != "q" else "z"
    begins = [
        _matcher(tokens, _grammar(structure)).consume_tokens(tokens.tokenize_bytes(text.encode()))
        for text in (mark, mark[:-1] + other)
    ]
    return begins == [True, False]


def _matcher(tokens: LLTokenizer, grammar: str) -> LLMatcher:
    from llguidance import LLMatcher, LLParserLimits

    return LLMatcher(tokens, grammar, log_level=_SILENT, limits=LLParserLimits(**LIMITS))


def _grammar(structure: Structure) -> str:
    """Returns the structure as a grammar of llguidance."""
    if isinstance(structure, Tried):
        return structure.grammar
    try:
        return grammar_of(structure.kind, structure.text)
    except ValueError as error:
        raise bad(structure, str(error)) from None


def bad(structure: Structure, message: str) -> InvalidRequest:
    """Returns the error of a structure that cannot be followed."""
    return InvalidRequest(f"the structure ({structure.kind}) cannot be followed: {_message(message)}")


def _message(message: str) -> str:
    """Returns the error message without the parser's state, which llguidance appends."""
    told = re.split(r"\n<(?:state|non-verbose)", message, maxsplit=1)[0].strip()
    for words, plain in _PLAIN:
        told = re.sub(words, plain, told)
    return told


@define(eq=False)
class Guide:
    """One sequence's way through its structure.

    Going back is llguidance's own roll-back and then a mask, which is thrown away: otherwise the next mask may be the
    one of the state before (1.9.1).
    """

    _fresh: LLMatcher | None  # never reads a token, only its copies do
    error: str = ""
    """The reason why the structure cannot be followed (any more). Once set, it stays. A guide without a matcher has an
    error from the start."""
    _matcher: LLMatcher = field(init=False)
    _read: list[int] = field(init=False, factory=list)  # the tokens that ``_matcher`` has read

    def __attrs_post_init__(self) -> None:
        if self._fresh is not None:
            self._matcher = self._fresh.deep_copy()

    def start(self, committed: Sequence[int]) -> None:
        """Reads the tokens that a sequence already has when it starts; it has some if it has run before."""
        if not self.error and not self._go_to(committed):
            self.error = self._told() or f"{_CANNOT}: it does not allow the tokens that were sampled before"

    def allowed(self, generated: Sequence[int]) -> NDArray[np.uint8] | None:
        """Returns the tokens that may follow ``generated``, one bit for each, the lowest first. A finished structure
        allows only end-of-text tokens.

        ``None``: there is an `error`, or ``generated`` has a token that was not allowed. That is a draft token, or
        belongs to a step in flight. Tokens that are sampled after it are dropped.
        """
        if self.error or not self._go_to(generated):
            return None
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self.error = self._told()
        return None if self.error else bits

    def nothing(self) -> NDArray[np.uint8]:
        """Returns no token, in the form of `allowed`. What is returned may be changed."""
        return np.zeros(len(self._matcher.compute_bitmask()), np.uint8)

    def valid(self, generated: Sequence[int], proposed: Sequence[int]) -> int:
        """Returns how many of ``proposed``, counted from the first, may follow ``generated``."""
        if self.error or not self._go_to(generated):
            return 0
        return self._matcher.validate_tokens(list(proposed))

    def _go_to(self, tokens: Sequence[int]) -> bool:
        """Goes back to the common beginning and reads the rest of ``tokens``. True if all tokens were read."""
        same = _common(self._read, tokens)
        if same < len(self._read):
            self._go_back(same)
        new = list(tokens[len(self._read) :])
        if not new:
            return True
        read = self._matcher.try_consume_tokens(new)
        self._read += new[:read]
        self.error = self._told()
        stuck = read < len(new) and not self.error and not self._matcher.is_accepting()  # else it may be an end-of-text
        if stuck and self._allows(new[read]):  # llguidance 1.9.1, of added tokens
            self.error = f"{_CANNOT}: it has the text of token {new[read]}, which it cannot read; leave that text out"
        return read == len(new) and not self.error

    def _allows(self, token: int) -> bool:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        return token // 8 < len(bits) and bool(bits[token // 8] >> token % 8 & 1)

    def _go_back(self, length: int) -> None:
        """Goes back to the state that has read ``length`` tokens."""
        self._matcher.rollback(len(self._read) - length)
        self._matcher.compute_bitmask()
        del self._read[length:]

    def _told(self) -> str:
        return f"{_CANNOT}: {_message(self._matcher.get_error())}" if self._matcher.is_error() else ""


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Returns the length of the longest common beginning."""
    length = min(len(first), len(second))
    if list(first[:length]) == list(second[:length]):
        return length
    return next(place for place in range(length) if first[place] != second[place])


@frozen(kw_only=True)
class Tried(Structure):
    """A structure with its grammar, which a process has made within limits."""

    grammar: str = field(eq=False, repr=False)
    size: int = field(eq=False)  # bytes that the compiled grammar takes


@frozen(kw_only=True)
class Compiled(Structure):
    """A structure with its grammar, compiled for one model. It is sent with its request and lives as long."""

    matcher: LLMatcher = field(eq=False, repr=False)  # never reads a token, only its copies do
    size: int = field(eq=False)


@define(eq=False)
class Grammars:
    """The latest compiled grammars of one model, and the model's tokenizer in the form that llguidance needs. That form
    is built with the first grammar. The object holds no tensors.

    `compile` is called in several threads, `guide` in the executor's thread, `find` and `keep` in the event loop. A
    thread that nobody waits for may end after `close`. llguidance holds the interpreter's lock while it makes a
    tokenizer, so the tokenizer is made in two halves, between which steps go on.
    """

    tokenizer: Callable[[], Any] = field(repr=False)  # returns the tokenizer of transformers
    vocabulary: int
    eos_token_ids: tuple[int, ...]
    capacity: int = 64 * 2**20  # bytes of grammars that are kept
    _translated: LLTokenizer | None = field(init=False, default=None, repr=False)
    _compiled: dict[Structure, Compiled] = field(init=False, factory=dict, repr=False)  # the least recently used first
    _making: threading.Lock = field(init=False, factory=threading.Lock, repr=False)  # held while the tokenizer is made
    _keeping: threading.Lock = field(init=False, factory=threading.Lock, repr=False)  # of the fields; never held long
    _closed: bool = field(init=False, default=False, repr=False)

    def guide(self, structure: Structure | None, committed: Sequence[int] = ()) -> Guide | None:
        """Returns a guide for a new sequence, which has read ``committed``; ``None`` if there is no structure.

        If the structure cannot be followed, nothing is raised: the guide has the error, which then affects its own
        request alone."""
        if structure is None:
            return None
        try:
            compiled = self.compile(structure)
        except InvalidRequest as error:
            return Guide(None, str(error))
        if compiled is not structure:  # the replica of a cluster compiles in a step
            self.keep(compiled)
        guide = Guide(compiled.matcher)
        guide.start(committed)
        return guide

    def find(self, structure: Structure) -> Compiled | None:
        """Returns ``structure`` with its grammar if it is kept."""
        with self._keeping:
            found = self._compiled.pop(_plain(structure), None)
            if found is not None:
                self._compiled[_plain(found)] = found
            return found

    def compile(self, structure: Structure) -> Compiled:
        """Returns ``structure`` with its grammar. The grammar is compiled now, unless the structure has it already, or
        it was kept.

        Raises:
            InvalidRequest: the structure cannot be followed, or the checkpoint's tokenizer cannot follow any.
        """
        found = structure if isinstance(structure, Compiled) else self.find(structure)
        if found is not None:
            return found
        matcher = _matcher(self._tokens(), _grammar(structure))
        first = matcher.deep_copy()
        first.compute_bitmask()
        if first.is_error():
            raise bad(structure, first.get_error())
        size = structure.size if isinstance(structure, Tried) else 0
        return Compiled(kind=structure.kind, text=structure.text, matcher=matcher, size=max(size, _LEAST))

    def keep(self, found: Compiled) -> None:
        """Keeps a compiled grammar for later requests, as far as there is room. The least recently used ones go."""
        with self._keeping:
            if not self._closed:
                self._compiled[_plain(found)] = found
            while sum(4 * len(one.text) + one.size for one in self._compiled.values()) > self.capacity:
                del self._compiled[next(iter(self._compiled))]

    def _tokens(self) -> LLTokenizer:
        if not self.eos_token_ids:
            raise InvalidRequest(
                "a structure needs an end-of-text token, and this checkpoint has none; leave the structure out"
            )
        with self._making:
            made = self._translated or self._translate()
            with self._keeping:
                self._translated = None if self._closed else made
        return made

    def _translate(self) -> LLTokenizer:
        from llguidance import LLTokenizer
        from llguidance.hf import from_tokenizer

        try:
            tokenizer = self.tokenizer()
        except CheckpointError as error:  # the tokenizer is read only now; its files may have changed
            raise InvalidRequest(f"structures cannot be used: {error}") from error
        size = max(self.vocabulary, len(tokenizer))  # a tokenizer may have more than the model samples
        try:
            plain = from_tokenizer(tokenizer, n_vocab=size, eos_token=list(self.eos_token_ids), slices=[])
        except ValueError as error:
            raise InvalidRequest(f"this checkpoint's tokenizer cannot follow a structure: {error}") from error
        return plain.with_slices(LLTokenizer.general_slices())

    def release(self) -> None:
        """Forgets the grammars and the tokenizer."""
        with self._keeping:
            self._compiled.clear()
            self._translated = None

    def close(self) -> None:
        """Forgets the grammars and the tokenizer for good: what other threads still compile is not kept."""
        self._closed = True
        self.release()


def _plain(structure: Structure) -> Structure:
    """Returns ``structure`` without its grammar. Structures of different classes are never equal."""
    return Structure(kind=structure.kind, text=structure.text)
