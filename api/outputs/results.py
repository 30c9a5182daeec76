"""The engine's results: completions, deltas, transcripts and their segments, as frozen values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from attrs import evolve, field, frozen

from ...core.request import FinishReason
from ...core.timings import Timings

_MOST_TOLD = 8  # spans in one warning


@frozen(kw_only=True)
class Usage:
    """The numbers of tokens that one request read and wrote, and its seed, which reproduces the sampled tokens.
    ``reasoning_tokens`` of the tokens that it wrote come before its answer, marks included."""

    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0
    seed: int | None = field(default=None, eq=False)


TopLogprobs = tuple[tuple[int, float], ...]  # (token, natural log-probability), the likeliest first


@frozen(kw_only=True)
class Completion:
    """The whole output of one request.

    ``text`` is the answer, and ``reasoning`` what the model wrote before it between the marks of its chat template.
    ``text`` ends before a stop string. ``token_ids`` holds the generated tokens without the end-of-text or stop token.
    If a stop string ended the text, the last of ``token_ids`` is the token that made the end certain. ``logprobs``
    holds each token's natural log-probability after all rules and penalties, before the temperature. ``top_logprobs``
    holds for each token the likeliest tokens of the same distribution, as many as ``SamplingParams.logprobs`` asks for
    (fewer if fewer can be sampled); ``None`` if it asks for none. ``frames`` holds for each token the frames
    ``[first, stop)`` of the audio at which the model wrote it, each ``engine.model.frame_seconds`` long; it is empty
    unless the model reads frames (CTC models and transducers).

    ``alternatives`` holds the other completions that ``SamplingParams(n=...)`` asks for; each has a usage of its own
    and no alternatives. After a beam search they are the next best hypotheses. ``score`` is what a beam search ranks
    its hypotheses by (`triolet.core.plan.Hypothesis`), else ``None``. ``timings`` holds the time that each stage took;
    comparisons of completions ignore it. ``prompt_logprobs`` holds the log-probability of each token of the prompt but
    the first, and the likeliest tokens at its place, if ``SamplingParams.prompt_logprobs`` asks for them.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[float, ...] | None = None
    top_logprobs: tuple[TopLogprobs, ...] | None = None
    frames: tuple[tuple[int, int], ...] = ()
    usage: Usage
    alternatives: tuple[Completion, ...] = ()
    prompt_logprobs: tuple[tuple[float, TopLogprobs], ...] | None = None
    score: float | None = None
    timings: Timings | None = field(default=None, eq=False)
    reasoning: str = ""


@frozen(kw_only=True)
class Delta:
    """The output of a streaming request since its last delta.

    ``text`` is ``""`` while a character is incomplete, while the text may begin a stop string, and before the answer,
    where the delta has ``reasoning``. The first ``reasoning_tokens`` of ``token_ids`` come before the answer. While the
    first tokens of an output may be the opening mark, they wait for the delta that decides it. ``logprobs``,
    ``top_logprobs`` and ``frames`` belong to ``token_ids``; see `Completion`. ``finish_reason`` and ``usage`` are set
    only in the last delta, which may have no tokens. A beam search has a single delta, at its end. The first delta has
    ``prompt_logprobs``, as in `Completion`.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[TopLogprobs, ...] | None = None
    frames: tuple[tuple[int, int], ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    prompt_logprobs: tuple[tuple[float, TopLogprobs], ...] | None = None
    reasoning: str = ""
    reasoning_tokens: int = 0


@frozen(kw_only=True)
class Word:
    """One word: ``text`` as the model wrote it, usually with a leading space and with the marks that belong to it.

    ``start`` and ``end`` are seconds from the beginning of the audio; ``probability``, 0 to 1, is the mean of the
    probabilities of its tokens. ``speaker`` is the name of who says it; ``None``: nobody asked, or it is not known yet.
    ``token_ids`` are its tokens, where they are known.
    """

    text: str
    start: float
    end: float
    probability: float
    speaker: str | None = None
    token_ids: tuple[int, ...] = field(default=(), eq=False, repr=False)


@frozen(kw_only=True)
class Segment:
    """A stretch of speech, from ``start`` to ``end``, both in seconds from the beginning of the audio.

    Segments of a transcript are in order and do not overlap; no segment reaches past the end of the audio.

    Args:
        id: 0 for the first segment of the audio, then counting.
        text: the text as the model wrote it, usually with a leading space; texts of segments are joined without a
            separator.
        token_ids: the text's tokens, without timestamps; none in parts of a segment that is split between speakers by
            the words of an aligner, which knows no tokens.
        avg_logprob: the mean natural log-probability of the tokens of the segment's *window*.
        no_speech_prob: the model's probability, 0 to 1, that nobody speaks in the window; 0 if the model has none.
        compression_ratio: the size of the window's text in UTF-8 over its zlib-compressed size; more than 2.4 means
            that the text repeats itself.
        temperature: the sampling temperature with which the window's text was sampled.
        words: the words with their times, if they were asked for; their joined texts are ``text``.
        logprobs: the natural log-probability of each of ``token_ids``.
        speaker: the name of who speaks; ``None``: nobody asked, or it is not known yet.
        language: the code of the language that is spoken; with ``multilingual`` each window has its own.
    """

    id: int
    start: float
    end: float
    text: str
    token_ids: tuple[int, ...]
    avg_logprob: float
    no_speech_prob: float
    compression_ratio: float
    temperature: float
    words: tuple[Word, ...] | None = None
    logprobs: tuple[float, ...] = field(default=(), eq=False, repr=False)
    speaker: str | None = None
    language: str | None = None


@frozen(kw_only=True)
class LiveText:
    """One update of a live session: what is new since the update before. All times are seconds of audio from the
    session's beginning.

    The text of an utterance is its ``stable`` parts joined, followed by the ``provisional`` text of the latest
    update. The stable parts of all updates, joined, are the session's text.

    Args:
        utterance: 0 for the first utterance with a text, then counting.
        stable: text that is new and final, as the model wrote it, usually with a leading space; "" if there is none.
        provisional: the rest of the utterance, which each update replaces; "" if there is none.
        words: the words of ``stable``; their joined texts are ``stable``. A punctuation mark that became stable later
            than its word is a word of its own, without length.
        start: the time at which ``stable`` begins; ``None`` if it is empty.
        end: the time at which ``stable`` ends; ``None`` if it is empty.
        position: the seconds of audio that were read for this update.
        language: the code of the spoken language.
        ends_utterance: true if the utterance is over; ``provisional`` is empty then.
    """

    utterance: int
    stable: str
    provisional: str
    words: tuple[Word, ...]
    start: float | None
    end: float | None
    position: float
    language: str | None
    ends_utterance: bool = False

    def followed_by(self, later: LiveText) -> LiveText:
        """Joins this update with ``later``, the next update of the same utterance, for readers that are late."""
        assert self.utterance == later.utterance, "updates of two utterances stay two"
        assert not self.ends_utterance, "an utterance ends once"
        return evolve(
            later,
            stable=self.stable + later.stable,
            words=self.words + later.words,
            start=later.start if self.start is None else self.start,
            end=self.end if later.end is None else later.end,
        )


@frozen(kw_only=True)
class Stretch:
    """A part of the audio, and what became of it. ``kind`` is one of these:

    - ``"speech"``: the part has text.
    - ``"silent"``: nobody speaks.
    - ``"failed"``: somebody may speak, but there is no text.
    - ``"excluded"``: ``clip_timestamps`` leaves the part out.
    - ``"unread"``: the part is not read yet, or the transcription was stopped before it.
    """

    start: float
    end: float
    kind: str


@frozen(kw_only=True)
class Turn:
    """``speaker`` speaks from ``start`` to ``end``, in seconds from the beginning of the audio."""

    start: float
    end: float
    speaker: str


@frozen(kw_only=True)
class Transcript:
    """The text of one audio.

    Args:
        text: the segments' text without outer blanks.
        language: the code of the spoken language ("en"); ``None``: nobody speaks. With ``multilingual`` it is the one
            in which the audio begins, as in faster-whisper; `languages` has all.
        language_probability: the model's certainty among the languages it knows, 0 to 1; ``None`` if the language was
            not detected, because the caller named it or the model knows only one.
        language_probabilities: the probability of each language by its code, if the language was detected.
        word_times: the way in which the times of words were found: ``"cross-attention"`` of the model's decoder,
            ``"frames"`` at which it wrote its tokens, or ``"aligner"``; ``None`` if no words were asked for.
        duration: the length of the audio in seconds.
        task: ``"transcribe"`` or ``"translate"``.
        coverage: the stretches of the audio, in order, and what became of each.
        turns: who speaks when, ordered by the starts, if ``speakers`` asked for it. The default diarizer does not know
            when two people speak at once, so its turns never overlap: one of the two has the time.
        warnings: sentences; each reports something that was not done as asked.
        timings: the time that each stage took; comparisons of transcripts ignore it.
    """

    text: str
    language: str | None
    language_probability: float | None
    duration: float
    segments: tuple[Segment, ...]
    timings: Timings | None = field(default=None, eq=False)
    task: str = "transcribe"
    coverage: tuple[Stretch, ...] = ()
    warnings: tuple[str, ...] = ()
    language_probabilities: Mapping[str, float] | None = None
    turns: tuple[Turn, ...] = ()
    word_times: str | None = None

    @property
    def languages(self) -> tuple[str, ...]:
        """The codes of the languages of the segments, in the order in which they begin."""
        found = dict.fromkeys(one.language for one in self.segments if one.language is not None)
        return tuple(found) or (() if self.language is None else (self.language,))

    @property
    def speakers(self) -> tuple[str, ...]:
        """The names of the speakers who have text, in the order in which it begins."""
        return tuple(dict.fromkeys(one.speaker for one in self.segments if one.speaker is not None))


@frozen(kw_only=True)
class Progress:
    """The state of a transcription, with times in seconds of audio.

    Args:
        so_far: the transcript without its segments. Its timings are set at the end only.
        duration: the length of the audio; ``None`` while it is not known.
        position: the time up to which all is done.
        seconds_read: how much of the audio is done. A parallel transcription also reads beyond ``position``.
        ahead: the segments that are read, but were not given out yet. ``ahead`` and the coverage of ``so_far`` are set
            only at the end, or if the whole state was asked for.
    """

    so_far: Transcript
    duration: float | None
    position: float
    seconds_read: float = 0.0
    ahead: tuple[Segment, ...] = ()

    def transcript(self, segments: Iterable[Segment]) -> Transcript:
        """Returns the transcript with ``segments``, which are all segments that were given out, and with those
        ``ahead``.
        """
        found = (*segments, *self.ahead)
        return evolve(self.so_far, segments=found, text="".join(segment.text for segment in found).strip())


def spans_told(spans: Sequence[tuple[float, float]]) -> str:
    """Returns beginnings and ends in seconds as a text for a warning, which names the first few."""
    told = ", ".join(f"{start:.2f} to {end:.2f}" for start, end in spans[:_MOST_TOLD])
    return f"{told} s" + (f" and {len(spans) - _MOST_TOLD} others" if len(spans) > _MOST_TOLD else "")
