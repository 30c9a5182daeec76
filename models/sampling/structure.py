"""Structured output: the tokens that may come next if the whole text is to follow a `Structure`.

The work is done by llguidance (https://github.com/guidance-ai/llguidance), which parses grammars on tokens. The package
is imported with the first structure.

::

    Structure -> fault_of          (any thread, needs no model)   a bad one is its caller's InvalidRequest
              -> Grammars.compile  (any thread)                   compiled once, and given to its request: `Compiled`
              -> Grammars.guide    (the executor's thread)        copied for each sequence
              -> Guide.allowed     (each token)                   bits of the tokens that may come next

Each call of a guide names all tokens sampled so far, whatever earlier calls named. The guide takes back draft tokens
that were rejected, and reads the new ones. So replayed sequences and several draft tokens in one step need no special
care. `Guide.valid` returns how many draft tokens the structure allows.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

from ...core.errors import CheckpointError, InvalidRequest
from ...core.request import Structure

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_SILENT = 0  # llguidance's log level
_DEAD_END = (  # llguidance names no reason
    "no text that it allows can end, since a schema or a rule only refers to itself; give it another choice"
)
_LATEST = 16  # states of a guide that are kept; to go back farther, the guide reads all tokens again


def fault_of(structure: Structure) -> str:
    """Returns the reason why ``structure`` cannot be followed, as far as it is known without a model, else an empty
    text. The check takes milliseconds, for very large schemas up to a second.

    The fault is returned, not raised, since an error that leaves one of trio's threads is part of a reference cycle."""
    from llguidance import LLMatcher

    try:
        failed, messages = LLMatcher.validate_grammar_with_warnings(_grammar(structure))
    except InvalidRequest as error:
        return str(error)
    return str(_bad(structure, messages[0])) if failed else ""


def is_complete(structure: Structure, text: str) -> bool:
    """True if ``text`` is all of what ``structure`` describes; a text that ended early may be only its beginning."""
    from llguidance import LLMatcher, LLTokenizer

    tokens = LLTokenizer("byte")
    matcher = LLMatcher(tokens, _grammar(structure), log_level=_SILENT)
    return matcher.consume_tokens(tokens.tokenize_bytes(text.encode())) and matcher.is_accepting()


def _grammar(structure: Structure) -> str:
    """Returns the structure as a grammar of llguidance."""
    from llguidance import LLMatcher

    match structure.kind:
        case "regex":
            return LLMatcher.grammar_from_regex(structure.text)
        case "lark":
            return LLMatcher.grammar_from_lark(structure.text)
        case "json_schema":
            try:
                return LLMatcher.grammar_from_json_schema(structure.text)
            except ValueError as error:
                raise _bad(structure, str(error)) from None
        case _:
            quoted = [json.dumps(text, ensure_ascii=False) for text in _choices(structure)]  # Lark quotes as JSON does
            return LLMatcher.grammar_from_lark("start: " + " | ".join(quoted))


def _choices(structure: Structure) -> list[str]:
    try:
        texts = json.loads(structure.text)
    except ValueError as error:
        raise _bad(structure, str(error)) from None
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise _bad(structure, "it is not a JSON array of one or more texts that are not empty")
    return texts


def _bad(structure: Structure, message: str) -> InvalidRequest:
    return InvalidRequest(f"the structure ({structure.kind}) cannot be followed: {_message(message)}")


def _message(message: str) -> str:
    """Returns the error message without the parser's state, which llguidance appends."""
    told = message.split("\n<state>", maxsplit=1)[0].strip()
    return _DEAD_END if told == "NoExtensionBias" else told


@define(eq=False)
class Guide:
    """One sequence's way through its structure.

    The guide keeps copies of its latest states to go back to. llguidance can roll a matcher back, too, but a roll-back
    after a mask was computed may lead to a wrong state (1.9.1). A copy costs no more than a mask.
    """

    _fresh: LLMatcher | None  # never reads a token, only its copies do
    error: str = ""
    """The reason why the structure cannot be followed (any more). Once set, it stays. A guide without a matcher has an
    error from the start."""
    _matcher: LLMatcher = field(init=False)
    _read: list[int] = field(init=False, factory=list)  # the tokens that ``_matcher`` has read
    _past: deque[tuple[int, LLMatcher]] = field(init=False, factory=lambda: deque(maxlen=_LATEST))

    def __attrs_post_init__(self) -> None:
        if self._fresh is not None:
            self._matcher = self._fresh.deep_copy()

    def start(self, committed: Sequence[int]) -> None:
        """Reads the tokens that a sequence already has when it starts; it has some if it has run before."""
        if not self.error and not self._go_to(committed):
            self.error = self._told() or "tokens that were sampled before are none of its"

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

    def valid(self, generated: Sequence[int], proposed: Sequence[int]) -> int:
        """Returns how many of ``proposed``, counted from the first, may follow ``generated``."""
        if self.error or not self._go_to(generated):
            return 0
        return self._matcher.deep_copy().try_consume_tokens(list(proposed))

    def _go_to(self, tokens: Sequence[int]) -> bool:
        """Goes back to the common beginning and reads the rest of ``tokens``. True if all tokens were read."""
        same = _common(self._read, tokens)
        if same < len(self._read):
            self._go_back(same)
        new = list(tokens[len(self._read) :])
        if not new:
            return True
        if not self._past or self._past[-1][0] < len(self._read):
            self._past.append((len(self._read), self._matcher.deep_copy()))
        read = self._matcher.try_consume_tokens(new)
        self._read += new[:read]
        self.error = self._told()
        return read == len(new) and not self.error

    def _go_back(self, length: int) -> None:
        """Goes back to the latest state that has read ``length`` tokens or fewer."""
        assert self._fresh is not None, "a guide without a matcher has an error"
        while self._past and self._past[-1][0] > length:
            self._past.pop()
        length, matcher = self._past[-1] if self._past else (0, self._fresh)
        self._matcher = matcher.deep_copy()
        del self._read[length:]

    def _told(self) -> str:
        return _message(self._matcher.get_error()) if self._matcher.is_error() else ""


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Returns the length of the longest common beginning."""
    length = min(len(first), len(second))
    if list(first[:length]) == list(second[:length]):
        return length
    return next(place for place in range(length) if first[place] != second[place])


@frozen(kw_only=True)
class Compiled(Structure):
    """A structure with its grammar, compiled for one model. It is sent with its request and lives as long."""

    matcher: LLMatcher = field(eq=False, repr=False)  # never reads a token, only its copies do


@define(eq=False)
class Grammars:
    """The latest ``capacity`` compiled grammars of one model, and the model's tokenizer in the form that llguidance
    needs. That form is built with the first grammar. The object holds no tensors.

    `compile` is called in several threads, `guide` in the executor's thread. One thread at a time compiles, and each
    grammar is compiled once. A thread that nobody waits for may end after `close`. Its grammar is not kept. llguidance
    holds the interpreter's lock while it makes a tokenizer, so the tokenizer is made in two halves, between which steps
    go on.
    """

    tokenizer: Callable[[], Any] = field(repr=False)  # returns the tokenizer of transformers
    vocabulary: int
    eos_token_ids: tuple[int, ...]
    capacity: int = 32
    _translated: LLTokenizer | None = field(init=False, default=None, repr=False)
    _compiled: dict[Structure, Compiled] = field(init=False, factory=dict, repr=False)
    _making: threading.Lock = field(init=False, factory=threading.Lock, repr=False)  # held while a grammar is compiled
    _keeping: threading.Lock = field(init=False, factory=threading.Lock, repr=False)  # of the fields; never held long
    _closed: bool = field(init=False, default=False, repr=False)

    def guide(self, structure: Structure | None, committed: Sequence[int] = ()) -> Guide | None:
        """Returns a guide for a new sequence, which has read ``committed``; ``None`` if there is no structure.

        If the structure cannot be followed, nothing is raised: the guide has the error, which then affects its own
        request alone."""
        if structure is None:
            return None
        try:
            guide = Guide(self.compile(structure).matcher)
        except InvalidRequest as error:
            return Guide(None, str(error))
        guide.start(committed)
        return guide

    def compile(self, structure: Structure) -> Compiled:
        """Returns ``structure`` with its grammar. The grammar is compiled now, unless the structure has it already, or
        it was kept. A grammar with an error is not kept.

        Raises:
            InvalidRequest: the structure cannot be followed, or the checkpoint's tokenizer cannot follow any.
        """
        if isinstance(structure, Compiled):
            return structure
        with self._making:
            found = self._compiled.get(structure) or self._compile(structure)
            self._keep(structure, found)
        return found

    def _compile(self, structure: Structure) -> Compiled:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokens(), _grammar(structure), log_level=_SILENT)
        first = matcher.deep_copy()
        first.compute_bitmask()
        if first.is_error():
            raise _bad(structure, first.get_error())
        return Compiled(kind=structure.kind, text=structure.text, matcher=matcher)

    def _keep(self, structure: Structure, found: Compiled) -> None:
        with self._keeping:
            if self._closed:
                return
            self._compiled.pop(structure, None)
            self._compiled[structure] = found  # the least recently used comes first
            if len(self._compiled) > self.capacity:
                del self._compiled[next(iter(self._compiled))]

    def _tokens(self) -> LLTokenizer:
        if not self.eos_token_ids:
            raise InvalidRequest(
                "a structure needs an end-of-text token, and this checkpoint has none; leave the structure out"
            )
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
