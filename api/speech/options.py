"""The options of a transcription, and their checks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from attrs import field, frozen

from ...core.checks import Check, Refused, as_number, instance, integer, number, one_of, settle
from ...core.errors import InvalidRequest

TASKS = ("transcribe", "translate")


TIMESTAMPS = ("segment", "none")


TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


def _read_temperatures(value: Any) -> tuple[float, ...]:
    values = value.tolist() if isinstance(value, np.ndarray) else value
    found = tuple(map(as_number, values if isinstance(values, list | tuple) else [values]))
    if not found or not all(0.0 <= one < math.inf for one in found):
        raise Refused
    return found


_TEXT = instance(str, "a text")


_THRESHOLD = number(-math.inf, math.inf).or_none("off")


_CHECKS = {
    "language": _TEXT.or_none("the model detects it"),
    "task": one_of(*TASKS),
    "prompt": _TEXT.or_none("nothing comes before"),
    "timestamps": one_of(*TIMESTAMPS),
    "compression_ratio_threshold": _THRESHOLD,
    "logprob_threshold": _THRESHOLD,
    "no_speech_threshold": _THRESHOLD,
    "seed": integer(-(2**63), 2**63 - 1).or_none("a fresh one for each transcription"),
}


def _temperatures(value: Any) -> tuple[float, ...]:
    check = Check(_read_temperatures, "one or more numbers, 0 (greedy) or positive")
    return tuple(check.of("temperature", value))


@frozen(kw_only=True)
class TranscribeOptions:
    """How an audio is transcribed.

    Args:
        language: the spoken language: a code ("en"), an English name ("english") or a token ("<|en|>"); ``None``: the
            model detects it in the first window.
        task: ``"transcribe"``, or ``"translate"`` into English.
        prompt: text that comes before the first window, for names and spelling; its last tokens are kept, up to half
            of the model's positions.
        timestamps: ``"segment"``: the model cuts segments and tells their times; ``"none"``: one segment per window.
        temperature: one or several (a list, a tuple, an array), tried in order until a window's text is good enough by
            the next two thresholds; 0 is greedy.
        compression_ratio_threshold: text that compresses better repeats itself: next temperature. ``None``: off.
        logprob_threshold: text with a lower average log-probability is improbable: next temperature. ``None``: off.
        no_speech_threshold: a window whose probability of no speech is higher, and whose text is improbable or empty,
            is silent. ``None``: off.
        seed: of the sampling at temperatures above 0; each further temperature takes the next seed. ``None``: a fresh
            seed.

    Raises:
        InvalidRequest: a value that no model allows. `Recipe` refuses values that its model does not allow.
    """

    language: str | None = None
    task: str = "transcribe"
    prompt: str | None = None
    timestamps: str = "segment"
    temperature: tuple[float, ...] = field(default=TEMPERATURES, converter=_temperatures)
    compression_ratio_threshold: float | None = 2.4
    logprob_threshold: float | None = -1.0
    no_speech_threshold: float | None = 0.6
    seed: int | None = 0

    def __attrs_post_init__(self) -> None:
        if self.timestamps == "word":
            raise InvalidRequest("timestamps='word' is not supported yet; allowed: 'segment', 'none'")
        settle(self, _CHECKS)
