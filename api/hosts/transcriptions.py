"""Opens transcriptions: the recording, who listens to it, and the walk through it, in one block."""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from attrs import evolve

from ...core.model import ModelDescription
from ..inputs.audio import AudioSource
from ..inputs.recording import Recording
from ..speech.cuts import CutRules
from ..speech.hearing import Hearing
from ..speech.options import TranscribeOptions
from ..speech.parallel import ParallelTranscription
from ..speech.plan import PlainPlan, Plan, VoicedPlan
from ..speech.reader import Run, Stopwatch, WindowReader
from ..speech.recipe import Recipe
from ..speech.spans import SpanRules
from ..speech.transcription import Transcription
from ..speech.voice import VoiceActivity
from .alternatives import background

_X = json.loads(os.environ.get("TX", "{}"))
GAP = _X.get("gap", 3.0)
PADDING = _X.get("padding", 0.4)
EARLIEST = _X.get("earliest", 0.66)
VOICE = SpanRules(min_silence=0.3, padding=0.1, longest=None)


@asynccontextmanager
async def open_transcription(
    audio: AudioSource,
    options: TranscribeOptions,
    description: ModelDescription,
    run: Run,
    *,
    request_id: str,
    asked: float,
    at_once: int,
    detector: VoiceActivity,
) -> AsyncIterator[Transcription]:
    """A transcription of ``audio``, for the block.

    Raises:
        InvalidRequest: options that the model does not allow, audio that cannot be read.
    """
    if options.seed is None:
        options = evolve(options, seed=secrets.randbits(62))
    recipe = Recipe(options=options, description=description)  # raises before a file is read in vain
    reader = WindowReader(recipe, run, request_id, Stopwatch(asked))
    async with Recording(audio, sampling_rate=description.sampling_rate, strict=options.strict) as recording:
        plan = _plan(options, description, recording, detector)
        if not options.parallel:
            yield Transcription(recording, plan, reader)
            return
        async with background() as start_soon:
            yield ParallelTranscription(recording, plan, reader, at_once=at_once, start_soon=start_soon)


def _plan(
    options: TranscribeOptions, description: ModelDescription, recording: Recording, detector: VoiceActivity
) -> Plan:
    rate = description.sampling_rate
    clips = [
        (round(start * rate), None if math.isinf(end) else round(end * rate)) for start, end in options.clip_timestamps
    ]
    read = tuple(clips) or ((0, None),)
    if options.voice_activity == "off":
        return PlainPlan(description.window_samples, read)
    rules = CutRules(
        window=description.window_samples,
        gap=round(GAP * rate),
        padding=round(PADDING * rate),
        earliest=round(EARLIEST * description.window_samples),
    )
    voice = detector if isinstance(options.voice_activity, str) else options.voice_activity
    return VoicedPlan(Hearing(recording, voice, VOICE), rules, read)
