"""What a caller asks for, as values: sampling, logit rules, encoder items and the request itself."""

from __future__ import annotations

import enum
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, Self

from attrs import evolve, field, frozen

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


def check_characters(text: str) -> None:
    """Raises `InvalidRequest` where ``text`` has lone surrogates, as file names and arguments that are no text have."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"a text with {text[error.start]!r} at character {error.start}, half of a surrogate pair, which is no "
            "character; decode it from bytes with errors='replace'"
        ) from None


STRUCTURES = ("json_schema", "regex", "lark", "choice")


@frozen(kw_only=True)
class Structure:
    """What the whole output must be: only tokens that can still lead there are sampled, and the end when it is reached.

    Args:
        kind: ``"json_schema"`` (``text`` is a JSON schema), ``"regex"``, ``"lark"`` (a grammar in llguidance's dialect
            of Lark) or ``"choice"`` (a JSON array of strings, one of which is the output).
        text: see ``kind``.

    Raises:
        InvalidRequest: an unknown kind, or no text. What ``text`` says is checked when the request is made.
    """

    kind: str
    text: str

    def __attrs_post_init__(self) -> None:
        _check(self.kind in STRUCTURES, f"structure kind {self.kind!r}", ", ".join(STRUCTURES))
        _check(
            isinstance(self.text, str) and bool(self.text.strip()), f"structure text {self.text!r}", "a text, not empty"
        )

    @classmethod
    def json_schema(cls, schema: str | Mapping[str, Any]) -> Self:
        """JSON that follows ``schema``, which may be written or a mapping."""
        return cls(kind="json_schema", text=schema if isinstance(schema, str) else json.dumps(schema))

    @classmethod
    def choice(cls, texts: Iterable[str]) -> Self:
        """Exactly one of ``texts``."""
        return cls(kind="choice", text=json.dumps(list(texts)))


def _texts(value: object) -> Any:
    """One text stands for a tuple of it; whatever is no collection is left for the check."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, Iterable) else value


def _pairs(value: object) -> Any:
    """A mapping as a tuple of pairs; whatever is no collection is left for the check."""
    if isinstance(value, Mapping):
        value = value.items()
    return tuple(value) if isinstance(value, Iterable) else value


_INTEGERS = ("min_tokens", "top_k", "seed", "n")
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
MOST_LOGPROBS = 20


@frozen(kw_only=True)
class SamplingParams:
    """How tokens are sampled, when the text ends, and what is told of it.

    What is done to the logits of a token, in this order, which is transformers': ``logit_bias``;
    ``repetition_penalty``; ``frequency_penalty`` and ``presence_penalty``; what must not be sampled (the checkpoint's
    suppressed tokens, ends before ``min_tokens``, what ``structure`` forbids) is ruled out; here log-probabilities are
    taken; then ``temperature``, ``top_k``, ``top_p``, ``min_p``.

    Args:
        max_tokens: most tokens to generate, at least 1; ``None``: up to the model's last position.
        min_tokens: end-of-text and stop tokens are not sampled before so many tokens. Stop strings end a text earlier.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_p: smallest set of tokens whose probability reaches it, in (0, 1]; 1 is off.
        top_k: only the k likeliest tokens; 0 is off.
        min_p: only tokens at least this times as likely as the likeliest, 0 to 1; 0 is off.
        repetition_penalty: of each token of the prompt or the output, positive logits are divided by it and negative
            ones multiplied; more than 0; 1 is off (Keskar et al. 2019, "CTRL", section 4.1).
        presence_penalty: taken from the logit of each token that the output has, -2 to 2; 0 is off.
        frequency_penalty: taken from the logit of a token as often as the output has it, -2 to 2; 0 is off.
        logit_bias: what is added to the logits of tokens, as a mapping from token id to number; inside, pairs.
        seed: draws are keyed by (seed, position), so the same seed gives the same tokens, replayed or batched.
        stop: strings that end the text; the text ends before the first of them. One string, or several.
        stop_token_ids: tokens that end the request beside the model's own end-of-text.
        ignore_eos: go on after end-of-text (for benchmarks).
        logprobs: tell the log-probabilities of so many of the likeliest tokens beside that of the sampled one, 0 to 20;
            ``None``: of the sampled one alone. They are those of the distribution after all rules and penalties,
            before the temperature and the limits behind it.
        n: how many completions of the prompt. The first is sampled with ``seed``, the others with seeds made from it,
            see `sibling`; without a temperature they are all the same.
        structure: what the output must be; `None`: anything. See `Structure`.

    Raises:
        InvalidRequest: a value out of its range.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = field(default=(), converter=_pairs)
    seed: int = 0
    stop: tuple[str, ...] = field(default=(), converter=_texts)
    stop_token_ids: tuple[int, ...] = field(default=(), converter=tuple)
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1
    structure: Structure | None = None

    def __attrs_post_init__(self) -> None:
        for name in _INTEGERS:
            check_integer(name, getattr(self, name))
        for name in _NUMBERS:
            value = getattr(self, name)
            _check(isinstance(value, int | float), f"{name}={value!r}", "a number")
        self._check_lengths()
        self._check_distribution()
        self._check_logit_bias()
        _check(
            isinstance(self.stop, tuple) and all(isinstance(text, str) and text for text in self.stop),
            f"stop={self.stop!r}",
            "a text, or several, none of them empty",
        )
        if self.structure is not None:
            self._check_structure()

    def _check_lengths(self) -> None:
        limit = self.max_tokens
        if limit is not None:
            check_integer("max_tokens", limit)
        if self.logprobs is not None:
            check_integer("logprobs", self.logprobs)
        _check(limit is None or limit >= 1, f"max_tokens={limit}", "1 or more, or None for the model's length")
        _check(self.min_tokens >= 0, f"min_tokens={self.min_tokens}", "0 or more")
        _check(limit is None or self.min_tokens <= limit, f"min_tokens={self.min_tokens}", f"up to max_tokens={limit}")
        _check(
            self.logprobs is None or 0 <= self.logprobs <= MOST_LOGPROBS,
            f"logprobs={self.logprobs}",
            f"0 to {MOST_LOGPROBS}, or None",
        )
        _check(self.n >= 1, f"n={self.n}", "1 or more")

    def _check_distribution(self) -> None:
        _check(0.0 <= self.temperature < math.inf, f"temperature={self.temperature}", "0 (greedy) or a positive number")
        _check(0.0 < self.top_p <= 1.0, f"top_p={self.top_p}", "more than 0, up to 1 (off)")
        _check(self.top_k >= 0, f"top_k={self.top_k}", "0 (off) or a positive number")
        _check(0.0 <= self.min_p <= 1.0, f"min_p={self.min_p}", "0 (off) to 1")
        penalty = self.repetition_penalty
        _check(0.0 < penalty < math.inf, f"repetition_penalty={penalty}", "a positive number; 1 is off")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _check(-2.0 <= value <= 2.0, f"{name}={value}", "-2 to 2; 0 is off")

    def _check_logit_bias(self) -> None:
        allowed = "a mapping from token ids to finite numbers"
        _check(isinstance(self.logit_bias, tuple), f"logit_bias={self.logit_bias!r}", allowed)
        for pair in self.logit_bias:
            good = isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], int | float)
            _check(good and math.isfinite(pair[1]), f"logit_bias with {pair!r}", allowed)
            check_integer("logit_bias of token", pair[0])
        tokens = [token for token, _ in self.logit_bias]
        _check(len(set(tokens)) == len(tokens), f"logit_bias with a token twice: {tokens}", allowed)

    def _check_structure(self) -> None:
        _check(isinstance(self.structure, Structure), f"structure={self.structure!r}", "Structure(...), or None")
        _check(not self.ignore_eos, "ignore_eos with a structure", "ignore_eos=False: nothing may follow its end")
        _check(self.min_tokens == 0, f"min_tokens={self.min_tokens} with a structure", "0: it ends where it ends")

    def sibling(self, index: int) -> SamplingParams:
        """How completion ``index`` of `n` is sampled: the first with the plain seed, each other with one of its own,
        the same whenever it is asked for."""
        if index == 0:
            return evolve(self, n=1)
        digest = hashlib.blake2b(f"sibling:{self.seed}:{index}".encode(), digest_size=8).digest()
        return evolve(self, n=1, seed=int.from_bytes(digest, "big") >> 1)


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
    """What is done to the logits before a token is sampled, beside `SamplingParams`."""

    suppress: tuple[int, ...] = ()  # never sampled
    begin_suppress: tuple[int, ...] = ()  # not sampled as the first generated token
    allowed: tuple[int, ...] | None = None  # only these are sampled
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
    checkpoint's classification head: one score per label). ``normalize`` divides by the Euclidean length. ``second`` is
    the first position of the second of two texts, for models that tell them apart (BERT's token types).
    """

    kind: str
    normalize: bool = False
    second: int | None = None

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
    page_keys: tuple[bytes, ...] = field(default=(), repr=False)  # of the prompt's full pages, computed off the loop
