"""The request of a caller, as values: sampling, logit rules, encoder items and the request itself."""

from __future__ import annotations

import enum
import hashlib
import json
import sys
from collections.abc import Iterable, Mapping
from copy import copy
from typing import Any, Self

from attrs import field, frozen

from .checks import (
    Check,
    Refused,
    as_integer,
    as_number,
    by,
    check_characters,
    checked,
    demand,
    flag,
    instance,
    integer,
    nearest_names,
    number,
    one_of,
    settle,
    several,
    shown,
)
from .errors import InvalidRequest
from .reasoning import Reasoning


class FinishReason(enum.Enum):
    """The reason why a request ended well."""

    STOP = "stop"  # an end-of-text or stop token, or a stop string
    LENGTH = "length"  # max_tokens, or the model's last position
    POOLED = "pooled"  # the whole prompt was read into a vector (requests with a `Pooling`)
    ALIGNED = "aligned"  # the times of the prompt's tokens were found (requests with an `Alignment`)


MOST_LOGPROBS = 20
MOST_COMPLETIONS = 1_024
MOST_BEAMS = 256
_MOST_TOKENS = 2**31 - 1
_MOST_STOPS = 64
_MOST_CHARACTERS = 1_024  # per stop string
_MOST_BIAS = 1_000_000.0  # a logit is a float32
_MOST_GRAMMAR = 4_000_000  # characters
_MOST_BIASES = 1_000_000  # tokens: more than any vocabulary has
ELSEWHERE = {
    "do_sample": "temperature",
    "chat_template_kwargs": "template_options",
    "eos_token_id": "stop_token_ids",
    "grammar": "structure",
    "max_completion_tokens": "max_tokens",
    "max_length": "max_tokens",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "num_beams": "beam_size",
    "num_return_sequences": "n",
    "response_format": "structure",
    "sampling_params": "sampling",
    "stop_strings": "stop",
    "thinking_budget": "max_reasoning_tokens",
    "thinking_token_budget": "max_reasoning_tokens",
    "tool_choice": "structure",
    "top_logprobs": "logprobs",
}
"""Names of options in other programs, each with the option that does the same here."""


def _stop_text(value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= _MOST_CHARACTERS:
        raise Refused
    check_characters(value)
    return value


def _token(value: Any) -> int:
    found = as_integer(value)
    if not 0 <= found <= _MOST_TOKENS:
        raise Refused
    return found


def _bias(pair: Any) -> tuple[int, float]:
    token, value = pair
    bias = as_number(value)
    if not abs(bias) <= _MOST_BIAS:
        raise Refused
    return _token(token), bias


def _grammar_text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip() or len(value) > _MOST_GRAMMAR:
        raise Refused
    check_characters(value)
    return value


POOLINGS = ("mean", "cls", "last", "classify")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
STRUCTURES = ("json_schema", "regex", "lark", "choice")


@frozen(kw_only=True)
class Structure:
    """The form that the whole output must have. The sampler excludes tokens that cannot lead to this form, and ends the
    output when it is complete.

    Args:
        kind: ``"json_schema"`` (``text`` is a JSON schema), ``"regex"``, ``"lark"`` (a grammar in llguidance's dialect
            of Lark) or ``"choice"`` (a JSON array of strings, one of which is the output).
        text: see ``kind``.

    Raises:
        InvalidRequest: the kind is unknown, or there is no text. The contents of ``text`` are checked when the request
            is made.
    """

    kind: str = field(metadata=by(one_of(*STRUCTURES)))
    text: str = field(metadata=by(Check(_grammar_text, f"a text, not empty, of up to {_MOST_GRAMMAR} characters")))

    def __attrs_post_init__(self) -> None:
        settle(self, named="Structure.{}")

    @classmethod
    def json_schema(cls, schema: str | Mapping[str, Any]) -> Self:
        """Returns the structure of JSON that follows ``schema``, a text or a mapping."""
        if isinstance(schema, str):
            return cls(kind="json_schema", text=schema)
        try:
            return cls(kind="json_schema", text=json.dumps(schema))
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(
                f"schema={shown(schema)} cannot be written as JSON: {error}; allowed: a JSON schema, as text or mapping"
            ) from None

    @classmethod
    def choice(cls, texts: Iterable[str]) -> Self:
        """Returns the structure of an output that is exactly one of ``texts``."""
        return cls(kind="choice", text=json.dumps(_CHOICES.of("texts", texts)))


_TOKENS = several(_token, _MOST_BIASES, "a list of token ids (integers, 0 or more), as in [2]")
_BIASES = several(
    _bias,
    _MOST_BIASES,
    f"a mapping from token ids (integers) to finite numbers, {-_MOST_BIAS:,.0f} to {_MOST_BIAS:,.0f}",
)
_STOPS = several(_stop_text, _MOST_STOPS, f"a text, or up to {_MOST_STOPS}, each of 1 to {_MOST_CHARACTERS} characters")
_STRUCTURE = instance(Structure, "Structure(kind=..., text=...), as Structure.json_schema(...) makes one")
_CHOICES = several(_grammar_text, 100_000, "a list of texts, none of them empty")


def _texts(value: object) -> Any:
    """Turns one text into a tuple. The check reads the result."""
    return (value,) if isinstance(value, str) else value


def _pairs(value: object) -> Any:
    """Turns a mapping into its pairs. The check reads the result."""
    return value.items() if isinstance(value, Mapping) else value


def _ids(value: object) -> Any:
    """Returns any collection unchanged. The check makes a tuple of it."""
    return value


@nearest_names(ELSEWHERE)
@frozen(kw_only=True)
class SamplingParams:
    """The settings for sampling tokens, ending the text, and reporting log-probabilities.

    The sampler changes the logits of a token in the same order as transformers. First come ``logit_bias``, then
    ``repetition_penalty``, then ``frequency_penalty`` and ``presence_penalty``. Then forbidden tokens are excluded: the
    checkpoint's suppressed tokens, end tokens before ``min_tokens``, and tokens that ``structure`` forbids.
    Log-probabilities are taken at this point. Then come ``temperature``, ``top_k``, ``top_p`` and ``min_p``.

    Args:
        max_tokens: the largest number of tokens to generate, at least 1; ``None``: up to the model's last position.
        min_tokens: end-of-text and stop tokens are not sampled before this many tokens. Stop strings may end the text
            earlier.
        temperature: 0 always takes the likeliest token; otherwise logits are divided by it.
        top_p: sample only from the smallest set of likeliest tokens whose total probability reaches this value, in (0,
            1]; 1 is off.
        top_k: sample only from the k likeliest tokens; 0 is off.
        min_p: sample only from tokens at least ``min_p`` times as likely as the likeliest token, 0 to 1; 0 is off.
        repetition_penalty: above 1, tokens of the prompt and the output become less likely, 0.001 to 1,000; 1 is off.
            It divides their logits if these are positive, and multiplies them if negative (Keskar et al. 2019, "CTRL",
            section 4.1).
        presence_penalty: subtracted from the logit of each token that the output already has, -2 to 2; 0 is off.
        frequency_penalty: subtracted from a token's logit once for each occurrence of the token in the output, -2 to 2;
            0 is off.
        logit_bias: the number that is added to the logit of a token, up to a million either way. A mapping by token id,
            kept as pairs.
        seed: the same seed gives the same tokens, whatever runs beside the request. Sampling is keyed by (seed,
            position). With ``None`` each request gets a fresh seed when it is made, reported in ``Usage.seed``.
        stop: end the output before this text. One string, or up to 64 of them, each of up to 1,024 characters; the
            first that is written counts.
        include_stop_str_in_output: keep the ``stop`` text at the end of the output, as vLLM does.
        stop_token_ids: tokens that end the request, in addition to the model's own end-of-text.
        ignore_eos: go on after end-of-text (for benchmarks).
        logprobs: report the log-probabilities of this many of the likeliest tokens, 0 to 20, in addition to that of the
            sampled token; ``None``: only that of the sampled token. The distribution is the one after all rules and
            penalties, before ``temperature``, ``top_k``, ``top_p`` and ``min_p``.
        prompt_logprobs: report the log-probability of each token of the prompt, and those of this many of the likeliest
            tokens in its place, 0 to 20; ``None``: report none. They are the model's own, before all rules. The
            prompt is then read anew, in short chunks.
        n: the number of completions of the prompt, up to 1,024. The first is sampled with ``seed``, each other with a
            seed derived from ``seed``, see `sibling`. With temperature 0 all completions are the same.
        structure: the form that the output must have; ``None``: any form. See `Structure`.
        beam_size: search with this many beams, up to 256; 1: no beam search. It is transformers' ``num_beams``. Beam
            search requires temperature 0, and excludes ``structure``, ``stop`` and ``logprobs``. It returns the ``n``
            best hypotheses, the best first.
        length_penalty: a beam search ranks hypotheses by the sum of their log-probabilities over their length to this
            power, -10 to 10. Values above 0 favour longer hypotheses.
        patience: a beam search ends when so many hypotheses are finished: this number, up to 1,000, times ``beam_size``
            (Kasai et al. 2022), rounded. The value 1 is transformers' ``early_stopping=True``. ``None``: it ends with
            ``beam_size`` hypotheses, as soon as the best beam would not be among them if it ended now. This is
            ``early_stopping=False``.
        skip_special_tokens: leave special tokens out of the text. False: write them as the vocabulary spells
            them, except for the one that ends the text. ``None``: True, except for those special tokens that mark
            the calls of a request with tools.
        max_reasoning_tokens: the largest number of tokens of reasoning, in conversations whose chat template marks it.
            Then the model must write the closing mark, and goes on with its answer. It is less than ``max_tokens``, if
            both are given. ``None``: no limit of its own.
        reasoning_effort: how much a model reasons in a conversation, by OpenAI's words: ``"none"``, ``"minimal"``,
            ``"low"``, ``"medium"``, ``"high"``, ``"xhigh"`` or ``"max"``. The chat template is told, as far as it reads
            it; if it reads no effort, the words are shares of ``max_tokens``. ``None``: the template's own way.

    Raises:
        InvalidRequest: a value out of its range.
    """

    max_tokens: int | None = checked(None, integer(1, _MOST_TOKENS).or_none("up to the model's last position"))
    min_tokens: int = checked(0, integer(0, _MOST_TOKENS))
    temperature: float = checked(0.0, number(0, sys.float_info.max, "; 0 is greedy"))
    top_p: float = checked(1.0, number(0, 1, "; 1 is off", above=True))
    top_k: int = checked(0, integer(0, _MOST_TOKENS, "; 0 is off"))
    min_p: float = checked(0.0, number(0, 1, "; 0 is off"))
    repetition_penalty: float = checked(1.0, number(0.001, 1000, "; 1 is off"))
    presence_penalty: float = checked(0.0, number(-2, 2, "; 0 is off"))
    frequency_penalty: float = checked(0.0, number(-2, 2, "; 0 is off"))
    logit_bias: tuple[tuple[int, float], ...] = field(default=(), converter=_pairs, metadata=by(_BIASES))
    seed: int | None = checked(0, integer(-(2**63), 2**64 - 1).or_none("a fresh seed for each request"))
    stop: tuple[str, ...] = field(default=(), converter=_texts, metadata=by(_STOPS))
    include_stop_str_in_output: bool = checked(False, flag())
    stop_token_ids: tuple[int, ...] = field(default=(), converter=_ids, metadata=by(_TOKENS))
    ignore_eos: bool = checked(False, flag())
    logprobs: int | None = checked(None, integer(0, MOST_LOGPROBS).or_none("only of the sampled token"))
    prompt_logprobs: int | None = checked(None, integer(0, MOST_LOGPROBS).or_none("none"))
    n: int = checked(1, integer(1, MOST_COMPLETIONS))
    structure: Structure | None = checked(None, _STRUCTURE.or_none("any text"))  # noqa: RUF009  (a field)
    beam_size: int = checked(1, integer(1, MOST_BEAMS, "; 1: no beam search"))
    length_penalty: float = checked(1.0, number(-10, 10))
    patience: float | None = checked(
        None, number(0, 1000, above=True).or_none("search until no beam can become better")
    )
    skip_special_tokens: bool | None = checked(None, flag().or_none("True, but for marks of tool calls"))
    max_reasoning_tokens: int | None = checked(None, integer(0, _MOST_TOKENS).or_none("no limit of its own"))
    reasoning_effort: str | None = checked(None, one_of(*EFFORTS).or_none("the chat template's own way"))

    def __attrs_post_init__(self) -> None:
        settle(self)
        most = self.max_tokens
        demand(most is None or self.min_tokens <= most, f"min_tokens={self.min_tokens}", f"up to max_tokens={most}")
        tokens = [token for token, _ in self.logit_bias]
        demand(len(set(tokens)) == len(tokens), f"logit_bias={shown(tokens)}, with a token twice", "each token once")
        if self.structure is not None:
            demand(not self.ignore_eos, "ignore_eos with a structure", "ignore_eos=False")
            demand(self.min_tokens == 0, f"min_tokens={self.min_tokens} with a structure", "min_tokens=0")
        if self.beam_size > 1:
            self._check_beams()

    def _check_beams(self) -> None:
        beams = f"with beam_size={self.beam_size}"
        demand(self.temperature == 0.0, f"temperature={self.temperature} {beams}", "0, or beam_size=1")
        demand(self.structure is None, f"a structure {beams}", "no structure, or beam_size=1")
        demand(not self.stop, f"stop={shown(self.stop)} {beams}", "stop_token_ids, or beam_size=1")
        for name in ("logprobs", "prompt_logprobs"):
            demand(getattr(self, name) is None, f"{name}={getattr(self, name)} {beams}", "None, or beam_size=1")
        most = min(self.beam_size, self.most_hypotheses)
        demand(self.n <= most, f"n={self.n} {beams} and patience={self.patience}", f"up to {most}, or more beams")

    @property
    def most_hypotheses(self) -> int:
        """The largest number of hypotheses that a beam search keeps."""
        return self.beam_size if self.patience is None else max(1, round(self.beam_size * self.patience))

    def sibling(self, index: int) -> SamplingParams:
        """Returns the parameters of completion ``index`` of `n`. The first completion has the plain seed. Each other
        has a seed of its own, which depends on ``seed`` and ``index`` alone."""
        assert self.seed is not None, "a fresh seed is chosen when the request is built, before its siblings"
        sibling = copy(self)  # not checked again: a thousand completions would check a thousand biases each
        object.__setattr__(sibling, "n", 1)
        if index:
            digest = hashlib.blake2b(f"sibling:{self.seed}:{index}".encode(), digest_size=8).digest()
            object.__setattr__(sibling, "seed", int.from_bytes(digest, "big") >> 1)
        return sibling


@frozen(kw_only=True)
class TimestampRules:
    """Whisper's constraints on timestamp tokens (Radford et al. 2022, section 4.5). Timestamps come in pairs and never
    run backwards. The first lies within ``max_initial`` steps of 0. A timestamp is forced if all timestamps together
    are likelier than any text token."""

    begin_id: int  # <|0.00|>; every id from here on is a timestamp of 20 ms steps
    no_timestamps_id: int
    max_initial: int | None
    begun: tuple[int, ...] = ()  # the first tokens of the text, if they are in the prompt


@frozen(kw_only=True)
class LogitRules:
    """Further changes to the logits before a token is sampled, in addition to `SamplingParams`."""

    suppress: tuple[int, ...] = ()  # never sampled
    begin_suppress: tuple[int, ...] = ()  # not sampled as the first generated token
    allowed: tuple[int, ...] | None = None  # only these are sampled
    timestamps: TimestampRules | None = None
    min_tokens: int = 0  # end-of-text is not sampled before so many tokens
    no_repeat_ngram: int = 0  # no sequence of so many tokens occurs twice; 0 is off
    counts_prompt: bool = True  # no_repeat_ngram and the repetition penalty look at the prompt, too
    forced: tuple[tuple[int, int], ...] = ()  # (index, token): the generated token with this index is this token


@frozen(kw_only=True)
class Probe:
    """Requests the log-probabilities of ``token_ids`` in the raw distribution after prompt position ``position``."""

    position: int = field(metadata=by(integer(0, _MOST_TOKENS)))
    token_ids: tuple[int, ...] = field(metadata=by(_TOKENS))

    def __attrs_post_init__(self) -> None:
        settle(self, named="Probe.{}")


@frozen(kw_only=True)
class Pooling:
    """Requests one vector of the whole prompt instead of tokens.

    ``kind`` is ``"mean"`` (of all positions), ``"cls"`` (the first), ``"last"`` (the last) or ``"classify"`` (the
    checkpoint's classification head: one score per label). ``normalize`` divides by the Euclidean length. ``second`` is
    the first position of the second of two texts, for models that distinguish them (BERT's token types).
    """

    kind: str = field(metadata=by(one_of(*POOLINGS)))
    normalize: bool = checked(False, flag())
    second: int | None = checked(None, integer(0, _MOST_TOKENS).or_none("one text"))

    def __attrs_post_init__(self) -> None:
        settle(self, named="Pooling.{}")


@frozen(kw_only=True)
class Alignment:
    """Requests the times at which the tokens of the prompt are spoken, instead of further tokens. See `AlignedTokens`.

    The prompt is the output that is to be aligned: special tokens, then text (teacher forcing). The tokens from
    position ``start`` on are aligned with the first ``frames`` frames of the encoder's output. Later frames contain no
    audio. Log-probabilities are computed among the first ``among`` tokens of the vocabulary; ``None``: among all.

    Some models read the times at marks: the prompt has the token ``marks`` wherever a time is wanted, and the answer
    has one frame for each mark, in any order.
    """

    start: int = field(
        metadata=by(integer(1, _MOST_TOKENS, "; no token comes before the first one, which so cannot be aligned"))
    )
    frames: int = field(metadata=by(integer(1, _MOST_TOKENS)))
    among: int | None = checked(None, integer(1, _MOST_TOKENS).or_none("all tokens"))
    marks: int | None = checked(None, integer(0, _MOST_TOKENS).or_none("each token has a time"))

    def __attrs_post_init__(self) -> None:
        settle(self, named="Alignment.{}")


@frozen(kw_only=True)
class Placeholder:
    """The place in the prompt for the embeddings of one encoder item.

    ``spans`` are ranges ``[start, stop)`` of positions, ascending; the item's embeddings fill them in order. Positions
    after the prompt are those of generated tokens: the embeddings there are added to those of the tokens.
    ``grid`` is (time, height, width) in patches for models whose positions depend on it (M-RoPE), and empty otherwise.
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
        """True if an embedding of the item lies in ``[start, stop)``."""
        return any(first < stop and start < last for first, last in self.spans)


@frozen(kw_only=True, eq=False)
class EncoderItem:
    """One audio window or image of a request.

    ``key`` is the content key: a hash of the samples or pixels and of the processor's identity. Items with the same key
    share one encoding. ``payload`` is the input of the encoder (Whisper: float32 samples, shape (n,), at 16 kHz).
    Without ``spans`` the decoder reads the item through cross-attention; with ``spans`` the item's embeddings take
    these positions, see `Placeholder`. ``follows`` may name an item whose audio is the beginning of this one's: if its
    output is still resident, some encoders compute only what is new.
    """

    key: str
    payload: Any = field(repr=False)
    embeddings: int  # rows of the encoder's output, which the encode budget counts
    size: int  # bytes of the encoder's output, which the ledger counts
    spans: tuple[tuple[int, int], ...] = ()
    grid: tuple[int, ...] = ()
    follows: str = ""

    @property
    def placeholder(self) -> Placeholder | None:
        """The place of the item's embeddings; ``None``: the decoder reads the item through cross-attention."""
        return Placeholder(key=self.key, spans=self.spans, grid=self.grid) if self.spans else None


def most_tokens(positions: int, prompt_length: int, items: Iterable[EncoderItem]) -> int:
    """Returns the most tokens that can follow a prompt in a model of so many ``positions``. Where an item goes on after
    the prompt, the tokens end with it."""
    ends = (item.spans[-1][1] for item in items if item.spans)
    return min([positions, *(end for end in ends if end > prompt_length)]) - prompt_length


@frozen(kw_only=True, eq=False)
class Request:
    """One sequence to generate. Immutable; its progress lives in the planner.

    ``committed`` has the tokens that the request got in an engine that was lost afterwards. The request goes on after
    these tokens, and ``max_tokens`` counts them. A beam search, or a request that ``reads``, has none. A ``suspect``
    was running when an engine was lost. It runs apart from other requests until it has sampled a token.
    """

    id: str
    prompt_token_ids: tuple[int, ...]
    committed: tuple[int, ...] = ()
    suspect: bool = False
    items: tuple[EncoderItem, ...] = ()
    sampling: SamplingParams = SamplingParams()
    rules: LogitRules = LogitRules()
    calls: bool = False  # it has tools: marks of calls are part of its text, unless its sampling says otherwise
    reasoning: Reasoning | None = None  # None: all that it writes is the answer
    probe: Probe | None = None
    pooling: Pooling | None = None
    alignment: Alignment | None = None
    max_tokens: int = 1  # sampling.max_tokens resolved against the model's last position
    priority: int = 0  # the smallest runs first
    adapter: str = ""  # the key of its adapter; empty: it has none
    page_keys: tuple[bytes, ...] = field(default=(), repr=False)  # for the prompt's full pages, computed off the loop

    @property
    def reads(self) -> FinishReason | None:
        """The reason with which the request will end if it asks for a vector or times of its prompt; ``None``: the
        request asks for tokens."""
        if self.alignment is not None:
            return FinishReason.ALIGNED
        return None if self.pooling is None else FinishReason.POOLED
