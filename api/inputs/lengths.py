"""Texts that are too long for a model are refused before they are tokenized, or soon after that has begun.

What `Lengths` proves of a tokenizer refuses a text at once. It proves nothing of some tokenizers, and passes texts of
short tokens that are several times too long; so what may have far more tokens than fit is counted first, piece by
piece. Cuts change the count: the token that was cut becomes several, and those around it may change. Twice as many as
fit, and for each cut as many more as two of the longest tokens have characters, are therefore taken for too many; all
else is tokenized whole, and counted exactly. No tokenizer is known whose cuts change more, and none is proven not to.
So the work and the memory for one text are bounded by the model's positions, not by the text, and whoever gives up
waits for one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

import trio
from attrs import frozen

from ...core.checks import check_characters
from ...core.errors import ContextLengthExceeded
from ...core.model import ModelDescription
from .threads import run_in_thread

PIECE = 20_000  # characters: some milliseconds
_WORD = 100  # characters: where no token has a longest, words have (WordPiece's max_input_chars_per_word)
_SURELY_FEW = 4  # characters for each position: they cost little
_LEFT_OUT = 4  # times as much as fits is refused before a chat template is asked

T = TypeVar("T")
Pause = Callable[[], object]  # raises where nobody waits any more
IN_THREAD: Pause = trio.from_thread.check_cancelled  # in a thread of `run_in_thread`
NEVER: Pause = bool  # what is short is not given up in its middle


async def read_texts(work: Callable[[Pause], T], *, short: bool, reading: trio.CapacityLimiter) -> T:
    """Runs ``work``, which tokenizes, when its turn has come. It is nobody else's turn meanwhile: tokenizers use all
    cores that they find, and a hundred short texts in one turn of the event loop take as long as a long one.

    Args:
        short: in the event loop; else in a thread, which `Pause` stops when the caller is cancelled.
        reading: the turns.
    """
    if not short:
        return await run_in_thread(partial(work, IN_THREAD), limiter=reading)
    try:
        await reading.acquire()
    except trio.Cancelled as cancelled:
        cancelled.__traceback__ = None  # see `Mailbox._rest`
        raise
    try:
        return work(NEVER)
    finally:
        reading.release()


@frozen
class Limit:
    """The longest text that is allowed.

    Args:
        most: the number of its tokens.
        allowed: the end of an error's message.
    """

    description: ModelDescription
    most: int
    allowed: str

    @classmethod
    def of_prompts(cls, description: ModelDescription) -> Limit:
        """A prompt leaves a position for the answer."""
        most, positions = description.max_positions - 1, description.max_positions
        return cls(description, most, f"up to {most:,} tokens, the model has {positions:,} positions")

    def check_length(self, what: str, texts: tuple[str, ...], *, times: int = 1) -> None:
        """Looks at nothing but lengths, and at twice the characters that so many tokens can stand for: so the time
        depends on the model's positions, not on the texts. Where half of these become no tokens, all passes.

        Args:
            texts: which are read together.
            times: so many times as much passes.

        Raises:
            ContextLengthExceeded: they have more tokens for sure.
        """
        length, lengths, most = sum(map(len, texts)), self.description.lengths, times * self.most
        if lengths is None or length <= most * lengths.longest:
            return
        least, room = 0, 2 * (most + 1) * lengths.longest
        for text in texts:
            part = text[:room]
            least += lengths.least_tokens(part)
            room -= len(part)
            if least > most or not room:
                break
        if least > most:
            raise ContextLengthExceeded(
                f"{what} of {length:,} characters has {least:,} tokens or more; allowed: {self.allowed}"
            )

    def check_conversation(self, texts: Iterable[str]) -> None:
        """`check_length` before a chat template joins ``texts``. Templates may leave out some of them, such as what the
        model thought before, and the blanks around each: so several times as much passes. Nobody can stop a template
        that has begun: it takes as long as it takes for that."""
        self.check_length("a conversation", tuple(text.strip() for text in texts), times=_LEFT_OUT)

    def check_count(self, what: str, text: str, pause: Pause) -> None:
        """Counts the tokens of a long ``text`` until there are far too many, in a thread; see above for how far.

        Raises:
            ContextLengthExceeded: there are.
            InvalidRequest: it has lone surrogates, which are no characters.
        """
        self.check_length(what, (text,))
        if len(text) <= max(PIECE, _SURELY_FEW * self.most):
            return
        check_characters(text)
        lengths = self.description.lengths
        extra = 2 * (_WORD if lengths is None else lengths.longest)
        count, allowed = 0, 2 * self.most
        for start in range(0, len(text), PIECE):
            pause()
            allowed += extra
            count += self._tokens(text[start : start + PIECE])
            if count > allowed:
                raise ContextLengthExceeded(
                    f"{what} of {len(text):,} characters has about {count:,} tokens in its first {start + PIECE:,} "
                    f"characters; allowed: {self.allowed}"
                )
        pause()

    def _tokens(self, piece: str) -> int:
        tokenizer = self.description.tokenizer
        if self.description.preparer is None:
            return len(tokenizer.encode(piece, add_special_tokens=False))
        return len(tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"])
