"""Opens transcriptions: the recording, who listens to it, and the walk through it, in one block."""

from __future__ import annotations

import math
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from attrs import evolve

from ...core.model import ModelDescription
from ..inputs.audio import AudioSource
from ..inputs.recording import Recording
from ..speech.options import TranscribeOptions
from ..speech.parallel import ParallelTranscription
from ..speech.plan import PlainPlan, Plan
from ..speech.reader import Run, Stopwatch, WindowReader
from ..speech.recipe import Recipe
from ..speech.transcription import Transcription
from .alternatives import background


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
        plan = _plan(options, description)
        if not options.parallel:
            yield Transcription(recording, plan, reader)
            return
        async with background() as start_soon:
            yield ParallelTranscription(recording, plan, reader, at_once=at_once, start_soon=start_soon)


def _plan(options: TranscribeOptions, description: ModelDescription) -> Plan:
    rate = description.sampling_rate
    clips = [
        (round(start * rate), None if math.isinf(end) else round(end * rate)) for start, end in options.clip_timestamps
    ]
    return PlainPlan(description.window_samples, tuple(clips) or ((0, None),))
