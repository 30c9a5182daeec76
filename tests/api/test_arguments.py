"""The keywords that type checkers know are those that the engine takes."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import fields_dict

from triolet import SamplingParams, TranscribeOptions
from triolet.api.arguments import LiveArguments, SamplingArguments, TranscribeArguments
from triolet.api.live.options import OF_TRANSCRIPTIONS, LiveOptions

LIVE = {*fields_dict(LiveOptions), *OF_TRANSCRIPTIONS} - {"rate", "transcribe"}


@pytest.mark.parametrize(
    ("typed", "taken"),
    [
        (SamplingArguments, set(fields_dict(SamplingParams))),
        (TranscribeArguments, set(fields_dict(TranscribeOptions))),
        (LiveArguments, LIVE),
    ],
)
def test_every_option_is_typed_and_no_other(typed: Any, taken: set[str]) -> None:
    assert set(typed.__annotations__) == taken
