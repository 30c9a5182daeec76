"""The opening of transcriptions. One block holds the recording, the detector of voice activity and the
transcription.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from attrs import evolve, field, fields_dict, frozen

from ...core.config import EngineConfig
from ...core.errors import InvalidRequest
from ...core.model import ModelDescription
from ..inputs.audio import AudioSource
from ..inputs.recording import Recording
from ..inputs.sources import with_track
from ..speech.hearing import Hearing
from ..speech.options import TranscribeOptions
from ..speech.parallel import ParallelTranscription
from ..speech.plan import CutRules, Plan
from ..speech.reader import RunRequests, WindowReader
from ..speech.recipe import Recipe, speech_model
from ..speech.silero import Silero
from ..speech.speakers import Diarizer, SpeakerListener, turns_of
from ..speech.transcription import Transcription
from ..speech.voice import SpanRules, VoiceActivity, at_rate
from ..speech.voices import VoiceClusters
from .alternatives import background

_PAUSE = 0.3  # seconds: a window may be cut in a silence of this length
_MARGIN = 0.1  # seconds that count as speech before and after it, since its first and last sounds are quiet
_BREAK = 300.0  # seconds of silence that end a window in which the model knows who is who
_EARLIEST = 2 / 3  # the part of a window before which the window is not cut
_LEAST_REFERENCE, _MOST_REFERENCE = 1.6, 60  # seconds in the reference of a known speaker: of speech, and of audio


@frozen(eq=False)
class Detectors:
    """The detectors that all transcriptions of an engine share, with their weights: ``voice`` finds out when somebody
    speaks, and ``diarizer`` who."""

    voice: VoiceActivity = field(factory=Silero)
    diarizer: Diarizer = field(factory=VoiceClusters)


@asynccontextmanager
async def open_transcription(
    audio: AudioSource,
    options: TranscribeOptions,
    description: ModelDescription,
    run: RunRequests,
    *,
    request_id: str,
    asked: float,
    config: EngineConfig,
    detectors: Detectors,
) -> AsyncIterator[Transcription]:
    """Opens a transcription of ``audio`` for a block.

    Raises:
        InvalidRequest: the model does not allow an option, or the audio or a known speaker's cannot be read.
    """
    if options.seed is None:
        options = evolve(options, seed=secrets.randbits(62))
    facts = speech_model(description).facts
    is_diarized = options.speakers is not None or options.diarizer is not None
    if is_diarized and options.timestamps == "segment" and facts.word_times and not facts.names_speakers:
        options = evolve(options, timestamps="word")  # a segment may have the words of two speakers
    recipe = Recipe(options=options, description=description)  # checks the options before a file is read
    track, most = options.audio_track, options.max_audio_seconds or math.inf
    source = with_track(audio, track)
    if options.diarizer is not None:
        turns = await turns_of(options.diarizer, audio, options.strict, track)
        recipe = Recipe(options=evolve(options, diarizer=turns), description=description)
    reader = WindowReader(recipe, run, request_id, asked=asked)
    rate, own = description.sampling_rate, options.voice_activity
    voice = at_rate(detectors.voice, rate) if isinstance(own, str) else own
    listen = await _listen(recipe, voice, detectors.diarizer)
    async with Recording(source, sampling_rate=rate, strict=options.strict, most_seconds=most) as recording:
        hearing = None if own == "off" else Hearing(recording, voice, _voice(options), listen)
        plan = _plan(recipe, hearing)
        if not options.parallel:
            yield Transcription(recording, plan, reader)
            return
        # as many pieces as run together, and one whose window is encoded meanwhile: more would wait behind each other
        running = max(config.max_running // recipe.beam_size, 1) + 1
        at_once = min(running, description.cross_slots or running, config.max_pending)
        async with background() as start_soon:
            yield ParallelTranscription(recording, plan, reader, at_once=at_once, start_soon=start_soon)


async def _listen(recipe: Recipe, voice: VoiceActivity, diarizer: Diarizer) -> Callable[[int], SpeakerListener] | None:
    """Hears the known speakers. Returns the function that makes the listener of the recording; ``None``: nobody asks
    who speaks, or the model itself writes it.

    Raises:
        InvalidRequest: a reference of a known speaker cannot be read, or is too short or too long.
    """
    options, rate = recipe.options, recipe.description.sampling_rate
    if options.speakers is None or options.diarizer is not None or recipe.facts.names_speakers:
        return None
    if diarizer.sampling_rate != rate:
        raise InvalidRequest(f"the diarizer has {diarizer.sampling_rate} Hz; allowed: {rate} Hz, the rate of the model")
    known: dict[str, Any] = {}
    for name, audio in options.known_speakers.items():
        told, longest = f"the reference of the known speaker {name!r}", _MOST_REFERENCE * rate
        try:
            async with Recording(audio, sampling_rate=rate, strict=True) as recording:
                alone = partial(diarizer.listen, least=1, most=1, known={})
                hearing = Hearing(recording, voice, _voice(options), alone)
                await hearing.hear(longest + 1)
                known[name] = await hearing.voice()
        except InvalidRequest as error:
            raise InvalidRequest(f"{told}: {error}") from error
        seconds = sum(stop - start for start, stop in hearing.spans) / rate
        if hearing.heard > longest or seconds < _LEAST_REFERENCE:
            raise InvalidRequest(
                f"{told} has {seconds:.1f} s of speech in {hearing.heard / rate:.1f} s of audio; allowed: "
                f"{_LEAST_REFERENCE} s of speech or more (4 s are safer), in up to {_MOST_REFERENCE} s of audio"
            )
    least, most = options.speakers
    return partial(diarizer.listen, least=least, most=most, known=known)


def _plan(recipe: Recipe, hearing: Hearing | None) -> Plan:
    options, rate = recipe.options, recipe.description.sampling_rate
    clips = [
        (round(start * rate), end if math.isinf(end) else round(end * rate)) for start, end in options.clip_timestamps
    ]
    read = tuple(clips) or ((0, math.inf),)
    longest, silence = options.vad_max_speech_duration_s or math.inf, options.vad_min_silence_duration_ms / 1_000
    window = int(min(recipe.facts.window_samples, longest * rate))
    default = fields_dict(TranscribeOptions)["vad_min_silence_duration_ms"].default
    is_default = options.vad_min_silence_duration_ms == default
    gap = _BREAK if recipe.facts.names_speakers and is_default else silence
    rules = CutRules(
        window=window,
        gap=round(gap * rate),
        padding=round(min(options.vad_speech_pad_ms / 1_000, silence / 2) * rate),
        earliest=round(_EARLIEST * window),
    )
    return Plan(rules, read, hearing)


def _voice(options: TranscribeOptions) -> SpanRules:
    end, pause = options.vad_neg_threshold, min(_PAUSE, options.vad_min_silence_duration_ms / 1_000)
    return SpanRules(
        threshold=options.vad_threshold,
        end_threshold=max(options.vad_threshold - 0.15, 0.01) if end is None else end,
        min_speech=options.vad_min_speech_duration_ms / 1_000,
        min_silence=pause,
        padding=min(_MARGIN, pause / 2),
    )
