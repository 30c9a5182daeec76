"""The keywords that type checkers know are those that the engine takes."""

from __future__ import annotations

import inspect
import re
from inspect import Parameter
from pathlib import Path
from typing import Any

import pytest
from attrs import fields_dict

from triolet import (
    Engine,
    EngineConfig,
    EngineStateError,
    InvalidRequest,
    ModelSpec,
    SamplingParams,
    Speculation,
    SyncEngine,
    TranscribeOptions,
)
from triolet.api.arguments import GenerateArguments, LiveArguments, SamplingArguments, TranscribeArguments
from triolet.api.command_line.flags import sentences
from triolet.api.inputs.prompts import Query
from triolet.api.live.options import OF_TRANSCRIPTIONS, LiveOptions
from triolet.api.speech.options import OPTIONS
from triolet.core.config import ELSEWHERE
from triolet.server.schemas.speech import TranscriptionForm

LIVE = {*fields_dict(LiveOptions), *OF_TRANSCRIPTIONS} - {"rate", "transcribe"}


@pytest.mark.parametrize(
    ("typed", "taken"),
    [
        (SamplingArguments, set(fields_dict(SamplingParams))),
        (GenerateArguments, {*fields_dict(SamplingParams), *fields_dict(Query)} - {"prompt"}),
        (TranscribeArguments, set(fields_dict(TranscribeOptions))),
        (LiveArguments, LIVE),
    ],
)
def test_every_option_is_typed_and_no_other(typed: Any, taken: set[str]) -> None:
    assert set(typed.__annotations__) == taken


@pytest.mark.parametrize(
    ("method", "typed", "default"),
    [
        ("generate", GenerateArguments, ("sampling", None)),
        ("stream", GenerateArguments, ("temperature", 0.0)),
        ("transcribe", TranscribeArguments, ("known_speakers", {})),
        ("stream_transcription", TranscribeArguments, ("timestamps", "segment")),
        ("live", LiveArguments, ("beam_size", 1)),
    ],
)
def test_help_shows_every_option_with_its_type_and_default(method: str, typed: Any, default: tuple[str, Any]) -> None:
    shown = inspect.signature(getattr(Engine, method)).parameters
    assert shown.keys() >= typed.__annotations__.keys() | {"self", "wait"}
    assert {one.kind for one in shown.values()} <= {Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY}
    assert shown[default[0]].default == default[1]
    assert all(one.annotation for name, one in shown.items() if name != "self")


def test_every_option_of_a_transcription_is_explained_wherever_it_is_taken() -> None:
    """In the docstring, of which the command's help is made; on the page on live sessions; in the server's form."""
    page = (Path(__file__).parents[2] / "docs" / "speech_live.md").read_text(encoding="utf-8")
    assert tuple(sentences(TranscribeOptions)) == tuple(OPTIONS)
    assert set(re.findall(r"`(\w+)`", page)) >= LIVE
    assert {option.form for option in OPTIONS.values() if option.form} <= set(TranscriptionForm.model_fields)


@pytest.mark.parametrize(
    ("given", "near"),
    [
        ("gpu", "cuda"),
        ("gpu:1", "cuda:1"),
        ("nvidia", "cuda"),
        ("cuda0", "cuda:0"),
        (" auto", "auto"),
    ],
)
def test_a_device_by_another_name_is_answered_with_ours(given: str, near: str) -> None:
    """On making the settings, before any engine."""
    with pytest.raises(InvalidRequest, match=rf"device='{given}'; allowed: .*; did you mean '{near}'\?$"):
        EngineConfig(device=given)


@pytest.mark.parametrize("given", ["mps", "cuda:x", "cuda:-1", "", 0, None])
def test_a_device_that_is_like_none_of_ours_is_answered_with_what_is_allowed(given: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"allowed: 'auto', 'cpu', 'cuda' or .*lists what is there$"):
        EngineConfig(device=given)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (
            lambda: EngineConfig(max_model_len=4),
            "max_model_len= is not an option of EngineConfig; did you mean max_posi",
        ),
        (lambda: EngineConfig(max_runing=4), "did you mean max_running?"),
        (lambda: SamplingParams(max_new_tokens=4), "is not an option of SamplingParams; did you mean max_tokens?"),
        (lambda: ModelSpec("a model", alias=("a",)), "is not an option of ModelSpec; did you mean aliases?"),
        (
            lambda: Speculation(zzz=4),
            "zzz= is not an option of Speculation; allowed: tokens, match, most_running",
        ),
    ],
)
def test_a_name_that_a_class_of_settings_does_not_have_is_answered_with_the_nearest(make: Any, told: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(told)):
        make()


def test_names_that_others_have_for_a_setting_lead_to_settings_that_are_there() -> None:
    assert set(ELSEWHERE.values()) <= set(fields_dict(EngineConfig))
    assert not set(ELSEWHERE) & set(fields_dict(EngineConfig))


def test_a_plain_block_of_an_engine_is_answered_with_the_engine_that_has_one() -> None:
    with pytest.raises(EngineStateError, match="Without an event loop use SyncEngine"), Engine("a model"):
        pass


@pytest.mark.parametrize(
    ("keywords", "told"),
    [
        ({"device": "cpu"}, r"device= is not an option of Engine; did you mean config=EngineConfig\(device=...\)\?"),
        (
            {"max_pending": 3},
            r"max_pending= is not an option of Engine; did you mean config=EngineConfig\(max_pending=",
        ),
        ({"configg": None}, r"configg= is not an option of Engine; did you mean config\?"),
        ({"temperature": 1}, "temperature= is not an option of Engine; allowed: model, config"),
    ],
)
def test_a_setting_beside_the_model_is_told_its_place(keywords: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        Engine("a model", **keywords)
    with pytest.raises(InvalidRequest, match=told.replace("of Engine", "of SyncEngine")):
        SyncEngine("a model", **keywords)
