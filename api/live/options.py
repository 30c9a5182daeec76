"""The options of a live session, and their checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, fields_dict, frozen

from ...core.checks import checked, integer, number, settle, unknown_name
from ...core.errors import InvalidRequest
from ..inputs.sources import RATES
from ..speech.options import LIVE, OPTIONS, TranscribeOptions

OF_TRANSCRIPTIONS = tuple(name for name, option in OPTIONS.items() if LIVE in option.marks)
"""The options that live sessions share with transcriptions; `TranscribeOptions` explains them."""

_ELSEWHERE = {
    "sampling_rate": "rate",
    "sample_rate": "rate",
    "samplerate": "rate",
    "endpointing": "endpoint_silence",
    "min_chunk_size": "step",
    "lang": "language",
    "prompt": "initial_prompt",
}
"""Names of options in other programs, each with the option that does the same here."""


@frozen(kw_only=True)
class LiveOptions:
    """The options of a live session. docs/speech_live.md explains them.

    Args:
        rate: the sampling rate of the chunks that are fed, in Hz.
        step: seconds of new voice after which the utterance is read again. With a smaller step text becomes stable
            earlier, but the utterance is read more often, at most as often as the model can.
        endpoint_silence: seconds without voice that end an utterance.
        max_backlog: the most seconds of audio that may wait to be heard; `feed` waits for room.
        transcribe: the options that live sessions share with transcriptions. Beam search, and temperatures after the
            first one, apply only to the text at a pause; earlier text is greedy.

    Raises:
        InvalidRequest: a value that is not allowed.
    """

    rate: int = checked(16_000, integer(8_000, RATES[1], " (Hz)"))
    step: float = checked(0.5, number(0.1, 10))
    endpoint_silence: float = checked(0.7, number(0.1, 10))
    max_backlog: float = checked(10.0, number(0.1, 600))
    transcribe: TranscribeOptions = field(factory=lambda: TranscribeOptions(timestamps="none", beam_size=1))

    def __attrs_post_init__(self) -> None:
        settle(self)


def read_live_options(given: Mapping[str, Any]) -> LiveOptions:
    """Returns the options that a caller gave by name.

    Raises:
        InvalidRequest: an unknown name (the message names a similar one), or a value that is not allowed.
    """
    own = [name for name in fields_dict(LiveOptions) if name != "transcribe"]
    for name in given:
        if name not in own and name not in OF_TRANSCRIPTIONS:
            names = (*own, *OF_TRANSCRIPTIONS, "priority", "request_id", "wait")
            if name in OPTIONS:
                raise InvalidRequest(f"{name}= is not an option of a live session; allowed: {', '.join(names)}")
            raise unknown_name(name, names, _ELSEWHERE, owner="a live session")
    shared = {"beam_size": 1} | {name: value for name, value in given.items() if name in OF_TRANSCRIPTIONS}
    return LiveOptions(
        **{name: value for name, value in given.items() if name in own},
        transcribe=TranscribeOptions(timestamps="none", **shared),
    )
