"""Texts that are too long for a model are refused before they are tokenized, or soon after that has begun.

What `Lengths` proves of a tokenizer refuses a text at once. It proves little of a short vocabulary's texts and nothing
of some tokenizers; so a text that may have far more tokens than fit is counted first, piece by piece. Cuts change the
count: the token that was cut becomes several, and those around it may change. Twice as many as fit, and as many for
each cut as the longest token has characters, are therefore too many for sure; all else is tokenized whole, and counted
exactly. So the work and the memory for one text are bounded by the model's positions, not by the text, and whoever
gives up waits for one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import trio

from ...core.checks import check_characters
from ...core.errors import ContextLengthExceeded
from ...core.model import ModelDescription

PIECE = 20_000  # characters: some milliseconds
_WORD = 100  # characters: where no token has a longest, words have (WordPiece's max_input_chars_per_word)
_SURELY_FEW = 4  # tokens for each position cost little

_LEFT_OUT = 4  # times as much as fits is refused before a chat template is asked

Pause = Callable[[], object]  # raises where nobody waits any more
IN_THREAD: Pause = trio.from_thread.check_cancelled  # in a thread of `run_in_thread`
NEVER: Pause = bool  # what is short is not given up in its middle


def check_length(description: ModelDescription, what: str, texts: tuple[str, ...], most: int) -> None:
    """Looks at nothing but lengths.

    Raises:
        ContextLengthExceeded: ``texts``, read together, have more than ``most`` tokens for sure.
    """
    length = sum(map(len, texts))
    lengths = description.lengths
    if lengths is None or length <= most * lengths.longest:
        return
    least = sum(map(lengths.least_tokens, texts))
    if least > most:
        raise ContextLengthExceeded(
            f"{what} of {length:,} characters has {least:,} tokens or more; allowed: fewer than the model's "
            f"{description.max_positions:,} positions"
        )


def check_conversation(description: ModelDescription, texts: Iterable[str], most: int) -> None:
    """`check_length` of a conversation's ``texts``, before a chat template joins them. Templates may leave out some of
    the texts, such as what the model thought before, and the blanks around each: so several times as much passes.

    Raises:
        ContextLengthExceeded: the texts have far more than ``most`` tokens for sure.
    """
    check_length(description, "a conversation", tuple(text.strip() for text in texts), _LEFT_OUT * most)


def check_count(description: ModelDescription, what: str, text: str, most: int, pause: Pause) -> None:
    """Counts the tokens of a long ``text`` until there are too many, in a thread.

    Raises:
        ContextLengthExceeded: there are more than ``most``.
        InvalidRequest: it has lone surrogates, which are no characters.
    """
    check_length(description, what, (text,), most)
    if len(text) <= max(PIECE, _SURELY_FEW * most):
        return
    check_characters(text)
    extra = description.lengths.longest if description.lengths is not None else _WORD
    count, allowed = 0, 2 * most
    for start in range(0, len(text), PIECE):
        pause()
        count += _tokens(description, text[start : start + PIECE])
        if count > allowed:
            raise ContextLengthExceeded(
                f"{what} of {len(text):,} characters has about {count:,} tokens in its first {start + PIECE:,}; "
                f"allowed: fewer than the model's {description.max_positions:,} positions"
            )
        allowed += extra
    pause()


def _tokens(description: ModelDescription, piece: str) -> int:
    tokenizer = description.tokenizer
    if description.preparer is None:
        return len(tokenizer.encode(piece, add_special_tokens=False))
    return len(tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"])
