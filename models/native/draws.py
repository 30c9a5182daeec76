"""`Draw`: what a step asks of one row's logits; and the same for all rows, as the library reads it."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import chain
from struct import Struct

from attrs import frozen

from .library import Change, Choice

_DRAW, _EDIT, _FOUND = Struct("=4d11ifif"), Struct("=iif"), Struct("=iff")
ALL = -1
"""All tokens are allowed."""


@frozen(kw_only=True)
class Draw:
    """The questions to a row's logits, in the library's order: what is asked, edits, bans, timestamps, what
    is allowed, the choice.

    Args:
        choice: nothing, a token, or the likeliest ``told`` tokens of a ``BEAM``, whose log-probabilities take the place
            of its logits before the edits.
        temperature: 0 chooses the likeliest token, else one at ``point`` of the cumulative chances, in [0, 1).
            ``top_k``, ``top_p`` and ``min_p`` are as in `SamplingParams`.
        edits: tokens, each with what changes its logit.
        bans: tokens that are not allowed: the first one and the one after the last, one pair after the other.
        timestamps: the first of them. Where they together are likelier than any token before, none of those is allowed.
            0: there are none.
        allowed: a bit for each token, the lowest first; ``None``: all are.
        told: how many of the likeliest tokens are returned.
        asked: tokens whose log-probabilities are returned, by the logits as they are.
        total: is added to the scores that are returned.
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
"""The row's logits are left as they are."""


@frozen(eq=False)
class Chosen:
    """The answer to a `Draw`. A log-probability is NaN where the logits are broken.

    Args:
        token: what was chosen; `NONE`: no token is allowed.
        asked: the log-probabilities of the tokens that were asked for.
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
    """The draws of a step. What is found is written into ``draws`` and ``found``.

    Args:
        edits: of all draws, one after the other, as are ``bans``, ``found`` and ``allowed``.
    """

    draws: bytearray
    edits: bytearray
    bans: array[int]
    found: bytearray
    allowed: bytearray

    @classmethod
    def of(cls, draws: Sequence[Draw]) -> Arrays:
        """The draws of rows, in their order."""
        told, edits, bans, found, allowed = bytearray(), bytearray(), array("i"), bytearray(), bytearray()
        for draw in draws:
            first_edit, first_ban = len(edits) // _EDIT.size, len(bans) // 2
            first_found, first_bit = len(found) // _FOUND.size, ALL if draw.allowed is None else len(allowed)
            for edit in draw.edits:
                edits += _EDIT.pack(*edit)
            bans.extend(chain.from_iterable(draw.bans))
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
        """Edits, bans, what is found, and bytes of what is allowed."""
        return (
            len(self.edits) // _EDIT.size,
            len(self.bans) // 2,
            len(self.found) // _FOUND.size,
            len(self.allowed),
        )

    def answers(self) -> Iterator[Chosen]:
        """The answers, once the step is over."""
        found = list(_FOUND.iter_unpack(self.found))
        for each in _DRAW.iter_unpack(self.draws):
            first, count, asked, token, logprob = each[10], each[11], each[12], each[-2], each[-1]
            own = found[first : first + count]
            yield Chosen(token, logprob, tuple(one for *_, one in own[:asked]), own[asked:])
