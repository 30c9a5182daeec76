"""The values that the planner and the executor exchange: steps, encode batches and their results. They contain keys,
never tensors."""

from __future__ import annotations

from attrs import frozen

from .reasoning import Reasoning
from .request import Alignment, LogitRules, Placeholder, Pooling, Probe, SamplingParams


@frozen(kw_only=True)
class SequenceStart:
    """The facts that the executor needs about a sequence before its first chunk: its tokens so far, and how to sample
    more.

    ``token_ids`` has the prompt and, if a sequence starts anew, the tokens that are already committed.
    ``prompt_length`` separates the two, since begin-suppression and the sampling position count generated tokens only.
    """

    sequence_id: int
    token_ids: tuple[int, ...]
    prompt_length: int
    sampling: SamplingParams
    rules: LogitRules
    probe: Probe | None
    placeholders: tuple[Placeholder, ...] = ()
    pooling: Pooling | None = None
    max_tokens: int = 1  # most tokens after the prompt; only a beam search uses this and ``stops``
    stops: frozenset[int] = frozenset()  # tokens that end the sequence
    alignment: Alignment | None = None
    reasoning: Reasoning | None = None
    state: int | None = None  # the kept state that the sequence goes on from; None: it begins with position 0
    adapter: int | None = None  # the slot of its adapter

    @property
    def reads_only(self) -> bool:
        """True if the request asks for a vector or times of its prompt, so that no token is sampled."""
        return self.pooling is not None or self.alignment is not None


@frozen(kw_only=True)
class CrossWrite:
    """Orders that the cross-attention KV of encoder output ``key`` is written into ``slot`` before the step runs."""

    key: str
    slot: int


@frozen(kw_only=True)
class AdapterWrite:
    """Orders that the adapter ``key`` is written into ``slot`` before the step runs."""

    key: str
    slot: int


@frozen
class Keep:
    """Orders that a sequence's state is written into ``state`` as it is before ``position`` is read."""

    position: int
    state: int


@frozen  # one for each sequence and step: keyword arguments would cost more time than the object
class Chunk:
    """One sequence's part of a step: feed its tokens at positions ``start .. start+length-1``.

    The executor knows the tokens from `SequenceStart` and from its own sampling since. With two steps in flight the
    planner does not know the newest token yet. ``samples`` is true if the chunk ends at the sequence's last token, so
    that a new token is sampled. ``page_table`` names the self-attention pages: position p lies in page ``page_table[p
    // page_size]``.

    After the prompt of a beam search a chunk feeds up to ``beams`` rows, one token of each beam. The page table then
    has the full pages of the prompt, and for each later block of positions as many pages as there may be beams (see
    `triolet.core.beam_pages`). A chunk of a search that is over feeds nothing.

    ``states`` are the sequence's own states if the model has recurrent layers (see `triolet.core.recurrent`): as many
    as there may be beams, and another one if draft tokens were ever planned. ``keeps`` are the copies of its state that
    the chunk writes on the way. A position behind the chunk's last token, accepted draft tokens included, is not kept.
    """

    sequence_id: int
    start: int
    length: int
    page_table: tuple[int, ...]
    cross_slot: int | None
    samples: bool
    draft_tokens: int = 0
    beams: int = 1
    states: tuple[int, ...] = ()
    keeps: tuple[Keep, ...] = ()


@frozen(kw_only=True)
class StepPlan:
    """One launch of the decoder. The order of work is: forget ``ended``, record ``started``, write ``cross_writes`` and
    ``adapter_writes``, feed ``chunks``.

    ``epoch`` counts failed steps and lost generations. A step that was dispatched before the planner knew of an earlier
    failed step has the same epoch as that step. The runner skips it.
    """

    step_id: int
    epoch: int
    started: tuple[SequenceStart, ...]
    ended: tuple[int, ...]  # sequence ids whose record the executor drops
    cross_writes: tuple[CrossWrite, ...]
    chunks: tuple[Chunk, ...]
    adapter_writes: tuple[AdapterWrite, ...] = ()

    @property
    def tokens(self) -> int:
        """The number of tokens that the step feeds, draft tokens and the tokens of all beams included."""
        return sum([part.length * part.beams + part.draft_tokens for part in self.chunks])


@frozen
class Hypothesis:
    """A text that a beam search has found: its tokens, the end token included, and their log-probabilities as in
    `SampledToken`. The search ranks hypotheses by ``score``: the sum of the tokens' log-probabilities over ``length **
    length_penalty``. For the score, the rules only exclude tokens: the other log-probabilities are those before the
    rules, as in transformers. So they may be smaller than ``logprobs``.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    score: float


@frozen(kw_only=True)
class AlignedTokens:
    """The answer to an `Alignment`.

    ``frames`` has the encoder frame at which each aligned token begins, and then the frame at which the last token
    ends. So it has one value more than there are tokens, and the values never decrease. A frame lasts 20 ms in Whisper.
    ``logprobs`` has the log-probability of each token, given the tokens before it; minus infinity for a token outside
    `Alignment.among`. ``ends`` has the frame after the last one of each token, for models that know it.

    With `Alignment.marks`, ``frames`` and ``logprobs`` have the frame of each mark and its log-probability.
    """

    frames: tuple[int, ...]
    logprobs: tuple[float, ...]
    ends: tuple[int, ...] = ()


@frozen(kw_only=True)
class SampledToken:
    """The result of one chunk.

    ``token_id`` is the sampled token (``None`` for a chunk with ``samples=False``, a `Pooling` or an `Alignment`).
    ``logprob`` is its log-probability after all rules and penalties, before temperature, top-k and top-p. ``probe``
    answers a `Probe`, ``vector`` a `Pooling`, ``aligned`` an `Alignment`. ``top`` has the likeliest tokens and their
    log-probabilities, as many as `SamplingParams.logprobs` asks for. ``frames`` are the frames ``[first, stop)`` at
    which a CTC model or transducer wrote the token. ``error`` is the reason why the
    sequence cannot go on, if the fault lies in its request alone (a structure that cannot be followed). The token is
    then an end-of-text, and the caller gets `InvalidRequest`. ``accepted`` has the tokens sampled after this one
    because draft tokens proved right; their own ``accepted`` is empty. ``hypotheses`` has the results of a beam search,
    the best first. They come with the last chunk of the search, and ``token_id`` is ``None`` in all its chunks.
    ``prompt`` has, for each token of the prompt but the first, its log-probability and the likeliest tokens at its
    place, if `SamplingParams.prompt_logprobs` asks for them.
    """

    token_id: int | None
    logprob: float = 0.0
    probe: tuple[float, ...] | None = None
    top: tuple[tuple[int, float], ...] = ()
    vector: tuple[float, ...] | None = None
    aligned: AlignedTokens | None = None
    frames: tuple[int, int] | None = None
    error: str = ""
    accepted: tuple[SampledToken, ...] = ()
    hypotheses: tuple[Hypothesis, ...] = ()
    prompt: tuple[tuple[float, tuple[tuple[int, float], ...]], ...] = ()


@frozen(kw_only=True)
class StepResult:
    """The result of a step: one `SampledToken` for each chunk of the plan, in the same order."""

    step_id: int
    sampled: tuple[SampledToken, ...]


@frozen(kw_only=True)
class DeviceMemory:
    """The bytes that an executor holds, by owner, and the device that they are on."""

    device: str
    by_owner: dict[str, int]

    @property
    def total(self) -> int:
        """The number of bytes of all owners together."""
        return sum(self.by_owner.values())
