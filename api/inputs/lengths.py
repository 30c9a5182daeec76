"""Refuses texts that are too long for a model, before they are tokenized or soon after tokenizing has begun.

If `Lengths` proves that a text is too long, the text is refused at once. But for some tokenizers `Lengths` proves
nothing, and texts of short tokens pass although they are several times too long. So a text that may have far more
tokens than fit is first counted piece by piece. A cut between two pieces changes the count: a token that is cut becomes
several, and the tokens around it may change. So a text is refused only if its count exceeds twice the tokens that fit,
plus, for each piece, twice the characters of the longest token. With every known tokenizer the cuts change the count
less than that, but this is not proven. All other texts are tokenized whole, and counted exactly. So the work and the
memory for one text are bounded by the model's positions, not by the text. A caller who gives up waits for one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

import trio
from attrs import frozen

from ...core.checks import check_characters
from ...core.errors import ContextLengthExceeded
from ...core.model import ModelDescription
from ...core.tracebacks import Untraced
from .threads import run_in_thread

PIECE = 20_000  # characters: some milliseconds
_WORD = 100  # characters: the longest word, if no longest token is known (WordPiece's max_input_chars_per_word)
_SURELY_FEW = 4  # characters for each position: so few are not counted first
_LEFT_OUT = 4  # times as much as fits passes before a chat template runs

T = TypeVar("T")
Pause = Callable[[], object]  # raises an error if nobody waits any more
IN_THREAD: Pause = trio.from_thread.check_cancelled  # in a thread of `run_in_thread`
NEVER: Pause = bool  # short work is not given up in its middle


async def read_texts(work: Callable[[Pause], T], *, short: bool, reading: trio.CapacityLimiter) -> T:
    """Runs ``work``, which tokenizes, when its turn has come. No other work has its turn at the same time. A tokenizer
    uses all cores that it finds, and a hundred short texts in one turn of the event loop would take as long as a long
    one.

    Args:
        short: run ``work`` in the event loop; else it runs in a thread, and `Pause` stops it when the caller is
            cancelled.
        reading: the limiter that gives the turns.
    """
    if not short:
        return await run_in_thread(partial(work, IN_THREAD), limiter=reading)
    with Untraced(trio.Cancelled):
        await reading.acquire()
    try:
        return work(NEVER)
    finally:
        reading.release()


async def tokenizer_made(tokenizer: Any, reading: trio.CapacityLimiter) -> None:
    """Makes a tokenizer that is made when it is first needed. This takes long, so it is done in a thread, though short
    texts are read and written in the event loop.

    Raises:
        CheckpointError: the tokenizer's files are gone.
    """
    from ...models.checkpoints.gguf_tokenizer import GgufTokenizer

    if isinstance(tokenizer, GgufTokenizer) and not tokenizer.is_made:
        await run_in_thread(lambda: tokenizer.whole, limiter=reading)


@frozen
class Limit:
    """The longest text that is allowed.

    Args:
        most: the number of its tokens.
        allowed: the end of an error's message, which says what is allowed.
    """

    description: ModelDescription
    most: int
    allowed: str

    @classmethod
    def of_prompts(cls, description: ModelDescription) -> Limit:
        """Returns the limit of prompts. A prompt leaves a position for the answer."""
        most, positions = description.max_positions - 1, description.max_positions
        return cls(description, most, f"up to {most:,} tokens, since the model has {positions:,} positions")

    def check_length(self, what: str, texts: tuple[str, ...], *, times: int = 1) -> None:
        """Refuses texts that surely have too many tokens, judged by lengths alone. Looks at no more than twice the
        characters that the allowed tokens can stand for, so the time depends on the model's positions, not on the
        texts. If half of these characters become no tokens, the texts pass.

        Args:
            texts: texts that are read together.
            times: the texts may have this many times the tokens that fit.

        Raises:
            ContextLengthExceeded: the texts surely have more tokens.
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
        """Runs `check_length` before a chat template joins ``texts``. Several times as much as fits is allowed, since a
        template may leave out texts, such as earlier reasoning of the model, and the blanks around each text. A
        template that has begun cannot be stopped, so only this check bounds its time.
        """
        self.check_length("a conversation", tuple(text.strip() for text in texts), times=_LEFT_OUT)

    def check_count(self, what: str, text: str, pause: Pause) -> None:
        """Counts the tokens of a long ``text`` until there are far too many; the docstring of the module says how many.
        A long text is counted in a thread.

        Raises:
            ContextLengthExceeded: the text has far too many tokens.
            InvalidRequest: the text has lone surrogates, which are no characters.
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
