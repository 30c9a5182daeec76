"""The opening of live sessions. One block holds the session's ear, its readers and its two tasks."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from attrs import evolve

from ...core.checks import shown
from ...core.errors import InvalidRequest
from ...core.model import ModelDescription
from ..live.endpoints import Endpointer
from ..live.options import LiveOptions
from ..live.reader import UtteranceReader
from ..live.session import Ear, LiveTranscription
from ..live.streamed_session import StreamReader
from ..speech.options import TranscribeOptions
from ..speech.reader import RunRequests, WindowReader
from ..speech.recipe import Recipe
from ..speech.voice import VoiceActivity, at_rate
from .alternatives import background

_OF_READINGS = ("max_new_tokens", "compression_ratio_threshold", "logprob_threshold")  # of texts that are read again
_LONGEST = 30.0  # seconds that are read at once: each reading encodes all of them


@asynccontextmanager
async def open_live(
    options: LiveOptions, description: ModelDescription, run: RunRequests, *, request_id: str, detector: VoiceActivity
) -> AsyncIterator[LiveTranscription]:
    """Opens a live session for a block. Leaving the block ends the session's tasks and aborts their requests.

    Raises:
        InvalidRequest: the model does not allow an option.
    """
    session = _session(options, description, run, request_id, detector)
    async with background() as start_soon:
        start_soon(session.listen)
        start_soon(session.transcribe)
        try:
            yield session
        finally:
            session.close()


def _session(
    options: LiveOptions, description: ModelDescription, run: RunRequests, request_id: str, detector: VoiceActivity
) -> LiveTranscription:
    shared, detector = options.transcribe, at_rate(detector, description.sampling_rate)
    if shared.seed is None:
        shared = evolve(shared, seed=secrets.randbits(62))
    recipe = Recipe(options=shared, description=description)
    facts = recipe.facts
    if len(recipe.hotwords) > facts.history_tokens:
        raise InvalidRequest(
            f"hotwords={shown(shared.hotwords)} has {len(recipe.hotwords)} tokens; allowed: up to "
            f"{facts.history_tokens}"
        )
    thorough = WindowReader(recipe, run, request_id)
    reader: UtteranceReader | StreamReader
    if facts.stream_samples:
        plain = TranscribeOptions()
        for name in _OF_READINGS:
            value, default = getattr(shared, name), getattr(plain, name)
            if value not in (None, default):
                raise InvalidRequest(
                    f"{name}={value}, which {description.architecture} cannot use in a live session; allowed: "
                    f"{' or '.join(dict.fromkeys([f'{default}', 'None']))}"
                )
        model: Any = recipe.model
        reader, longest = StreamReader(thorough, model), facts.stream_samples
    else:
        best_of = 1 if "best_of" in facts.options else shared.best_of
        quick = evolve(shared, temperature=recipe.temperatures[:1], beam_size=1, best_of=best_of)
        interim = WindowReader(Recipe(options=quick, description=description), run, request_id, once=True)
        reader, longest = UtteranceReader(interim, thorough), min(facts.window_samples, recipe.samples(_LONGEST))
    endpointer = Endpointer(
        sampling_rate=description.sampling_rate,
        frame_samples=detector.frame_samples,
        endpoint_silence=options.endpoint_silence,
        step=round(options.step * description.sampling_rate),
        window=longest,
    )
    ear = Ear(options.rate, detector, description.sampling_rate)
    return LiveTranscription(options, ear, endpointer, reader)
