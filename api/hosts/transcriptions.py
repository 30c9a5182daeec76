"""The opening of transcriptions. One block holds the recording, the detector of voice activity and the
transcription.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio
from attrs import evolve, fields_dict

from ...core.config import EngineConfig
from ...core.model import ModelDescription
from ..inputs.audio import AudioSource
from ..inputs.recording import Recording
from ..speech.cuts import CutRules
from ..speech.hearing import Hearing
from ..speech.options import TranscribeOptions
from ..speech.parallel import ParallelTranscription
from ..speech.plan import Plan
from ..speech.reader import RunRequests, WindowReader
from ..speech.recipe import Recipe
from ..speech.spans import SpanRules
from ..speech.transcription import Transcription
from ..speech.voice import VoiceActivity, at_rate
from .alternatives import background

_PAUSE = 0.3  # seconds: a window may be cut in a silence of this length
_MARGIN = 0.1  # seconds that count as speech before and after it, since its first and last sounds are quiet
_BREAK = 300.0  # seconds of silence that end a window in which the model knows who is who
_EARLIEST = 2 / 3  # the part of a window before which the window is not cut


@asynccontextmanager
@trio.lowlevel.enable_ki_protection  # a ^C between the body and this exit would skip the exit
async def open_transcription(
    audio: AudioSource,
    options: TranscribeOptions,
    description: ModelDescription,
    run: RunRequests,
    *,
    request_id: str,
    asked: float,
    config: EngineConfig,
    detector: VoiceActivity,
) -> AsyncIterator[Transcription]:
    """Opens a transcription of ``audio`` for a block.

    Raises:
        InvalidRequest: the model does not allow an option, or the audio cannot be read.
    """
    if options.seed is None:
        options = evolve(options, seed=secrets.randbits(62))
    recipe = Recipe(options=options, description=description)  # checks the options before a file is read
    reader = WindowReader(recipe, run, request_id, asked=asked)
    async with Recording(audio, sampling_rate=description.sampling_rate, strict=options.strict) as recording:
        plan = _plan(recipe, recording, detector)
        if not options.parallel:
            yield Transcription(recording, plan, reader)
            return
        # as many pieces as run together, and one whose window is encoded meanwhile: more would wait behind each other
        running = max(config.max_running // recipe.beam_size, 1) + 1
        at_once = min(running, description.cross_slots or running, config.max_pending)
        async with background() as start_soon:
            yield ParallelTranscription(recording, plan, reader, at_once=at_once, start_soon=start_soon)


def _plan(recipe: Recipe, recording: Recording, detector: VoiceActivity) -> Plan:
    options, rate = recipe.options, recipe.description.sampling_rate
    clips = [
        (round(start * rate), end if math.isinf(end) else round(end * rate)) for start, end in options.clip_timestamps
    ]
    read = tuple(clips) or ((0, math.inf),)
    longest, silence = options.vad_max_speech_duration_s or math.inf, options.vad_min_silence_duration_ms / 1_000
    window = int(min(recipe.facts.window_samples, longest * rate))
    is_default = silence == fields_dict(TranscribeOptions)["vad_min_silence_duration_ms"].default / 1_000
    gap = _BREAK if recipe.facts.names_speakers and is_default else silence
    rules = CutRules(
        window=window,
        gap=round(gap * rate),
        padding=round(min(options.vad_speech_pad_ms / 1_000, silence / 2) * rate),
        earliest=round(_EARLIEST * window),
    )
    if options.voice_activity == "off":
        return Plan(rules, read)
    voice = at_rate(detector, rate) if isinstance(options.voice_activity, str) else options.voice_activity
    return Plan(rules, read, Hearing(recording, voice, _voice(options)))


def _voice(options: TranscribeOptions) -> SpanRules:
    end, pause = options.vad_neg_threshold, min(_PAUSE, options.vad_min_silence_duration_ms / 1_000)
    return SpanRules(
        threshold=options.vad_threshold,
        end_threshold=max(options.vad_threshold - 0.15, 0.01) if end is None else end,
        min_speech=options.vad_min_speech_duration_ms / 1_000,
        min_silence=pause,
        padding=min(_MARGIN, pause / 2),
    )
