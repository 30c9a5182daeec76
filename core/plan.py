"""The values that travel between the planner and the executor: steps, encode batches and their results. Keys, never
tensors."""

from __future__ import annotations

from typing import Any

from attrs import field, frozen

from .request import Alignment, LogitRules, Placeholder, Pooling, Probe, SamplingParams


@frozen(kw_only=True)
class SequenceStart:
    """The facts that the executor must know of a sequence before its first chunk: its tokens so far and how to sample
    more.

    ``token_ids`` is the prompt and, when a sequence starts anew, the tokens already committed. ``prompt_length``
    separates them (begin-suppression and the sampling position count generated tokens only).
    """

    sequence_id: int
    token_ids: tuple[int, ...]
    prompt_length: int
    sampling: SamplingParams
    rules: LogitRules
    probe: Probe | None
    placeholders: tuple[Placeholder, ...] = ()
    pooling: Pooling | None = None
    max_tokens: int = 1  # most tokens after the prompt; this and ``stops`` matter to a beam search alone
    stops: frozenset[int] = frozenset()  # tokens that end the sequence
    alignment: Alignment | None = None

    @property
    def reads_only(self) -> bool:
        """True if no token is sampled: something is asked of the prompt."""
        return self.pooling is not None or self.alignment is not None


@frozen(kw_only=True)
class CrossWrite:
    """Before the step runs, write the cross-attention KV of encoder output ``key`` into ``slot``."""

    key: str
    slot: int


@frozen  # one for each sequence and step: keyword arguments would cost more time than the object
class Chunk:
    """One sequence's part of a step: feed its tokens at positions ``start .. start+length-1``.

    The executor knows the tokens: those of `SequenceStart` and those that it has sampled since. With two steps in
    flight the planner does not know the newest token yet. ``samples`` is true where the chunk ends at the sequence's
    last token, so that a new token is sampled. ``page_table`` names the self-attention pages: position p lies in page
    ``page_table[p // page_size]``.

    Behind the prompt of a beam search a chunk feeds up to ``beams`` rows, a token of each beam. The page table then has
    the full pages of the prompt, and for each further block of positions as many pages as there may be beams (see
    `triolet.core.beam_pages`). A chunk of a search that is over feeds nothing.
    """

    sequence_id: int
    start: int
    length: int
    page_table: tuple[int, ...]
    cross_slot: int | None
    samples: bool
    draft_tokens: int = 0
    beams: int = 1


@frozen(kw_only=True)
class StepPlan:
    """One launch of the decoder. Order of work: forget ``ended``, record ``started``, write
    ``cross_writes``, feed ``chunks``.

    ``epoch`` counts failed steps and lost generations. A step that was dispatched before the planner knew of an earlier
    step's failure carries the failed step's epoch, and the runner skips it.
    """

    step_id: int
    epoch: int
    started: tuple[SequenceStart, ...]
    ended: tuple[int, ...]  # sequence ids whose record the executor drops
    cross_writes: tuple[CrossWrite, ...]
    chunks: tuple[Chunk, ...]

    @property
    def tokens(self) -> int:
        """Tokens fed by this step, draft tokens and those of all beams included."""
        return sum([part.length * part.beams + part.draft_tokens for part in self.chunks])


@frozen
class Hypothesis:
    """A text that a beam search has found: its tokens, the one that ends it included, and their log-probabilities as in
    `SampledToken`. ``score`` is what the search ranks hypotheses by: the sum of the tokens' log-probabilities over
    ``length ** length_penalty``. The score's log-probabilities are those before the rules, which rule tokens out but
    leave the others' as they are, as in transformers: so they may be smaller than ``logprobs``."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    score: float


@frozen(kw_only=True)
class AlignedTokens:
    """The answer to an `Alignment`.

    ``frames`` has for each aligned token the encoder frame at which it begins, 20 ms each in Whisper, and then the
    frame at which the last token ends: one more than there are tokens, never falling. ``logprobs`` has the tokens'
    log-probabilities, each given those before it; minus infinity for a token that is not `Alignment.among`.
    """

    frames: tuple[int, ...]
    logprobs: tuple[float, ...]


@frozen(kw_only=True)
class SampledToken:
    """The result of one chunk.

    ``token_id`` is the sampled token (``None`` for a chunk with ``samples=False``, a `Pooling` or an `Alignment`).
    ``logprob`` is its log-probability after all rules and penalties, before temperature, top-k and top-p. ``probe``
    answers a `Probe`, ``vector`` a `Pooling`, ``aligned`` an `Alignment`. ``top`` are the likeliest tokens and their
    log-probabilities, as many as `SamplingParams.logprobs` asks for. ``error`` says why the sequence cannot go on, for
    a fault of its request alone (a structure that cannot be followed): the token is then an end-of-text, and the caller
    gets `InvalidRequest`. ``accepted`` are the tokens sampled after this one, where draft tokens proved right; their
    ``accepted`` is empty. ``hypotheses`` are what a beam search has found, the best first; they come with its last
    chunk, and ``token_id`` is ``None`` in all its chunks.
    """

    token_id: int | None
    logprob: float = 0.0
    probe: tuple[float, ...] | None = None
    top: tuple[tuple[int, float], ...] = ()
    vector: tuple[float, ...] | None = None
    aligned: AlignedTokens | None = None
    error: str = ""
    accepted: tuple[SampledToken, ...] = ()
    hypotheses: tuple[Hypothesis, ...] = ()


@frozen(kw_only=True)
class StepResult:
    """One `SampledToken` for each chunk of the plan, in its order."""

    step_id: int
    sampled: tuple[SampledToken, ...]


@frozen(kw_only=True, eq=False)
class HostArray:
    """A tensor in host memory: ``data`` are its bytes, a NumPy array, and ``dtype`` is as torch names it."""

    shape: tuple[int, ...]
    dtype: str
    data: Any = field(repr=False)


@frozen(kw_only=True, eq=False)
class LentOutput:
    """A copy of an encoder output, on its way to another engine. The key is made of its content, weights and dtype.
    ``arrays``: that of the model, and that of a draft model that has an encoder too."""

    key: str
    size: int  # bytes of all ``arrays``: what the ledger counts
    arrays: tuple[HostArray, ...]


@frozen(kw_only=True)
class DeviceMemory:
    """Bytes that an executor holds, by owner, and the device they are on."""

    device: str
    by_owner: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes of all owners together."""
        return sum(self.by_owner.values())
