"""The opening of transcriptions. One block holds the recording, the detector of voice activity and the
transcription.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio
from attrs import evolve

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
from ..speech.voice import VoiceActivity
from .alternatives import background

_GAP = 3.0  # seconds: a longer silence is not read
_PADDING = 0.4  # seconds that are read before and after speech, since its first and last sounds are quiet
_EARLIEST = 2 / 3  # the part of a window before which the window is not cut
_VOICE = SpanRules(min_silence=0.3, padding=0.1)


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
    at_once: int,
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
        (round(start * rate), end if math.isinf(end) else round(end * rate)) for start, end in options.clip_timestamps
    ]
    read = tuple(clips) or ((0, math.inf),)
    rules = CutRules(
        window=description.window_samples,
        gap=round(_GAP * rate),
        padding=round(_PADDING * rate),
        earliest=round(_EARLIEST * description.window_samples),
    )
    if options.voice_activity == "off":
        return Plan(rules, read)
    voice = detector if isinstance(options.voice_activity, str) else options.voice_activity
    return Plan(rules, read, Hearing(recording, voice, _VOICE))
