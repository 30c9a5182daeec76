"""What a caller asks for, as values: sampling, logit rules, encoder items and the request itself."""

from __future__ import annotations

import enum
import math
from typing import Any

from attrs import field, frozen

from .errors import InvalidRequest


class FinishReason(enum.Enum):
    """Why a request ended well."""

    STOP = "stop"  # an end-of-text or stop token, or a stop string
    LENGTH = "length"  # max_tokens, or the model's last position
    POOLED = "pooled"  # the whole prompt was read and its vector given: requests with a `Pooling`


def _check(condition: bool, got: str, allowed: str) -> None:
    if not condition:
        raise InvalidRequest(f"{got}; allowed: {allowed}")


def check_integer(name: str, value: object) -> None:
    """Raises `InvalidRequest` where ``value`` is not an integer."""
    _check(isinstance(value, int) and not isinstance(value, bool), f"{name}={value!r}", "an integer")


@frozen(kw_only=True)
class SamplingParams:
    """How tokens are drawn.

    Args:
        max_tokens: most tokens to generate, at least 1; ``None``: up to the model's last position.
        min_tokens: end-of-text and stop tokens are not drawn before this many tokens.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_p: smallest set of tokens whose probability reaches it, in (0, 1]; 1 is off.
        top_k: only the k likeliest tokens; 0 is off.
        seed: draws are keyed by (seed, position), so the same seed gives the same tokens, replayed or batched.
        stop_token_ids: tokens that end the request beside the model's own end-of-text.
        ignore_eos: go on after end-of-text (for benchmarks).

    Raises:
        InvalidRequest: a value out of its range.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = field(default=(), converter=tuple)
    ignore_eos: bool = False

    def __attrs_post_init__(self) -> None:
        limit = self.max_tokens
        for name in ("min_tokens", "top_k", "seed", *(() if limit is None else ("max_tokens",))):
            check_integer(name, getattr(self, name))
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            _check(isinstance(value, int | float), f"{name}={value!r}", "a number")
        _check(limit is None or limit >= 1, f"max_tokens={limit}", "1 or more, or None for the model's length")
        _check(self.min_tokens >= 0, f"min_tokens={self.min_tokens}", "0 or more")
        _check(limit is None or self.min_tokens <= limit, f"min_tokens={self.min_tokens}", f"up to max_tokens={limit}")
        _check(0.0 <= self.temperature < math.inf, f"temperature={self.temperature}", "0 (greedy) or a positive number")
        _check(0.0 < self.top_p <= 1.0, f"top_p={self.top_p}", "more than 0, up to 1 (off)")
        _check(self.top_k >= 0, f"top_k={self.top_k}", "0 (off) or a positive number")


@frozen(kw_only=True)
class TimestampRules:
    """Whisper's constraints on timestamp tokens (Radford et al. 2022, section 4.5): they come in pairs, never run
    backwards, the first lies within ``max_initial`` steps of 0, and one is forced when timestamps together are likelier
    than any text token."""

    begin_id: int  # <|0.00|>; every id from here on is a timestamp of 20 ms steps
    no_timestamps_id: int
    max_initial: int | None


@frozen(kw_only=True)
class LogitRules:
    """What is done to the logits before a token is drawn, beside `SamplingParams`."""

    suppress: tuple[int, ...] = ()  # never drawn
    begin_suppress: tuple[int, ...] = ()  # not drawn as the first generated token
    allowed: tuple[int, ...] | None = None  # only these are drawn
    timestamps: TimestampRules | None = None


@frozen(kw_only=True)
class Probe:
    """Asks for the log-probabilities of ``token_ids`` in the raw distribution after prompt position ``position``."""

    position: int
    token_ids: tuple[int, ...]


@frozen(kw_only=True)
class Pooling:
    """Asks for one vector of the whole prompt instead of tokens.

    ``kind`` is ``"mean"`` (of all positions), ``"cls"`` (the first), ``"last"`` (the last) or ``"classify"`` (the
    checkpoint's classification head: one score per label). ``normalize`` divides by the Euclidean length.
    """

    kind: str
    normalize: bool = False

    def __attrs_post_init__(self) -> None:
        _check(self.kind in POOLINGS, f"pooling kind {self.kind!r}", ", ".join(POOLINGS))


POOLINGS = ("mean", "cls", "last", "classify")


@frozen(kw_only=True)
class Placement:
    """Where the embeddings of one encoder item go in the prompt.

    ``spans`` are ranges ``[start, stop)`` of prompt positions, ascending; the item's embeddings fill them in order.
    ``grid`` is (time, height, width) in patches, for models whose positions depend on it (M-RoPE), else empty.
    """

    key: str
    spans: tuple[tuple[int, int], ...]
    grid: tuple[int, ...] = ()

    @property
    def start(self) -> int:
        """The first position."""
        return self.spans[0][0]

    @property
    def stop(self) -> int:
        """One past the last position."""
        return self.spans[-1][1]

    def touches(self, start: int, stop: int) -> bool:
        """Whether an embedding lies in ``[start, stop)``."""
        return any(first < stop and start < last for first, last in self.spans)


@frozen(kw_only=True, eq=False)
class EncoderItem:
    """One audio window or image of a request.

    ``key`` is the content key: a hash of the samples or pixels and of the processor's identity. Two items with one key
    have one encoding. ``payload`` is what the executor encodes (Whisper: float32 samples, shape (n,), at 16 kHz).
    Without ``spans`` the item is read through cross-attention; with them its embeddings take these positions of the
    prompt, see `Placement`.
    """

    key: str
    payload: Any = field(repr=False)
    embeddings: int  # rows of the encoder's output: what the encode budget counts
    size: int  # bytes of the encoder's output: what the ledger counts
    spans: tuple[tuple[int, int], ...] = ()
    grid: tuple[int, ...] = ()

    @property
    def placement(self) -> Placement | None:
        """Where its embeddings go; ``None``: it is read through cross-attention."""
        return Placement(key=self.key, spans=self.spans, grid=self.grid) if self.spans else None


@frozen(kw_only=True, eq=False)
class Request:
    """One sequence to generate. Immutable; its progress lives in the planner."""

    id: str
    prompt_token_ids: tuple[int, ...]
    items: tuple[EncoderItem, ...] = ()
    sampling: SamplingParams = SamplingParams()
    rules: LogitRules = LogitRules()
    probe: Probe | None = None
    pooling: Pooling | None = None
    max_tokens: int = 1  # sampling.max_tokens resolved against the model's last position
    priority: int = 0  # smaller runs first
