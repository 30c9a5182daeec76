"""`Draw`: the questions of a step about the logits of one row. `Arrays`: the draws of all rows as the native library
reads them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from struct import Struct

from attrs import frozen

from .library import Change, Choice

_DRAW, _EDIT, _FOUND = Struct("=4d11ifif"), Struct("=iif"), Struct("=iff")
ALL = -1
"""All tokens are allowed."""


@frozen(kw_only=True)
class Draw:
    """The questions about a row's logits. The library answers and applies them in this order: ``asked``, ``edits``,
    ``bans``, ``timestamps``, ``allowed``, ``choice``.

    Args:
        choice: ``NOTHING``; ``TOKEN``: one token; ``BEAM``: the likeliest ``told`` tokens of a beam, whose logits are
            replaced by log-probabilities before the edits.
        temperature: 0 chooses the likeliest token. Otherwise the token at ``point`` of the cumulative probabilities is
            chosen, with ``top_k``, ``top_p`` and ``min_p`` as in `SamplingParams`.
        point: a number in [0, 1).
        edits: tokens, each with the change of its logit and the number to change it by.
        bans: ranges of tokens that are not allowed, as flat pairs: the first token and the token after the last.
        timestamps: the first timestamp token; 0: the model has none. If all timestamps together are likelier than any
            text token, no text token is allowed. Text tokens are those before the first timestamp.
        allowed: a bit for each token, the lowest first; ``None``: all tokens are allowed.
        told: the number of likeliest tokens that are returned.
        asked: tokens whose log-probabilities are returned, from the logits before any change.
        total: the number that is added to the returned scores.
    """

    choice: Choice = Choice.TOKEN
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    point: float = 0.0
    edits: Sequence[tuple[int, Change, float]] = ()
    bans: Sequence[Sequence[int]] = ()
    timestamps: int = 0
    allowed: bytes | None = None
    told: int = 0
    asked: Sequence[int] = ()
    total: float = 0.0


NOTHING = Draw(choice=Choice.NOTHING)
"""A draw that leaves the row's logits unchanged."""


@frozen(eq=False)
class Chosen:
    """The answer to a `Draw`. A log-probability is NaN if the logits are broken.

    Args:
        token: the chosen token; `NONE`: no token is allowed.
        logprob: the log-probability of ``token``.
        asked: the log-probabilities of the draw's ``asked`` tokens.
        found: the likeliest tokens, as (token, score, log-probability).
    """

    token: int
    logprob: float
    asked: tuple[float, ...]
    found: list[tuple[int, float, float]]


NONE = -1
"""No token."""


@frozen(eq=False)
class Arrays:
    """The draws of a step as the library reads them. It writes its answers into ``draws`` and ``found``.

    Args:
        draws: the fixed part of each draw, with indices into the other arrays.
        edits: the edits of all draws, one draw after the other; likewise ``bans``, ``found`` and ``allowed``.
    """

    draws: bytearray
    edits: bytearray
    bans: array[int]
    found: bytearray
    allowed: bytearray

    @classmethod
    def of(cls, draws: Sequence[Draw]) -> Arrays:
        """Packs ``draws``, in their order."""
        told, edits, bans, found, allowed = bytearray(), bytearray(), array("i"), bytearray(), bytearray()
        for draw in draws:
            first_edit, first_ban = len(edits) // _EDIT.size, len(bans) // 2
            first_found, first_bit = len(found) // _FOUND.size, ALL if draw.allowed is None else len(allowed)
            for edit in draw.edits:
                edits += _EDIT.pack(*edit)
            for ban in draw.bans:
                bans.extend(ban)
            for token in draw.asked:
                found += _FOUND.pack(token, 0.0, 0.0)
            found += bytes(draw.told * _FOUND.size)
            allowed += draw.allowed or b""
            told += _DRAW.pack(
                draw.temperature,
                draw.top_p,
                draw.min_p,
                draw.point,
                draw.choice,
                draw.top_k,
                first_edit,
                len(draw.edits),
                first_ban,
                len(bans) // 2 - first_ban,
                first_found,
                len(found) // _FOUND.size - first_found,
                len(draw.asked),
                first_bit,
                draw.timestamps,
                draw.total,
                NONE,
                0.0,
            )
        return cls(told, edits, bans, found, allowed)

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """Numbers of edits, of bans, of entries in ``found``, and of bytes in ``allowed``."""
        return (
            len(self.edits) // _EDIT.size,
            len(self.bans) // 2,
            len(self.found) // _FOUND.size,
            len(self.allowed),
        )

    def answers(self) -> Iterator[Chosen]:
        """Yields the answers, after the step."""
        found = list(_FOUND.iter_unpack(self.found))
        for each in _DRAW.iter_unpack(self.draws):
            first, count, asked, token, logprob = each[10], each[11], each[12], each[-2], each[-1]
            own = found[first : first + count]
            likeliest = [one for one in own[asked:] if one[0] != NONE]
            yield Chosen(token, logprob, tuple([one for *_, one in own[:asked]]), likeliest)
