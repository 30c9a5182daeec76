"""Warnings reach the clients of HTTP: members of JSON, a header, the last event, the access log."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st

from triolet import Transcript
from triolet.api.outputs.results import Stretch
from triolet.server.endpoints import common
from triolet.server.endpoints.common import in_header
from triolet.server.endpoints.speech import warnings_of

from .served import Served

HEADER = "x-triolet-warnings"
NAMES = ", ".join(f"Åsa Ödön {number}" for number in range(200))  # more than the model's room for text before
DROPPED, UNHEARD = (
    "hotwords has ",
    "no text, since voice activity finds no speech in audio that is not digital silence; ",
)


@pytest.fixture(scope="module")
def noise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("noise") / "noise.wav"
    soundfile.write(path, np.random.default_rng(0).normal(0, 0.01, 16_000), 16_000)
    return path


def raw(client: openai.OpenAI, file: Path, response_format: str) -> Any:
    asked = {
        "model": "whisper_random",
        "file": file,
        "response_format": response_format,
        "extra_body": {"hotwords": NAMES},
    }
    return client.audio.transcriptions.with_raw_response.create(**asked)


def holds(
    warnings: list[str], first: str = DROPPED, second: str = UNHEARD + "vad_filter=false reads all of it"
) -> bool:
    return len(warnings) == 2 and warnings[0].startswith(first) and warnings[1] == second


@pytest.mark.real_time
@pytest.mark.parametrize("kind", ["json", "verbose_json", "diarized_json", "text", "srt", "vtt"])
def test_every_format_tells_dropped_hotwords_and_speech_that_nobody_heard(client, noise, kind):
    answer = raw(client, noise, kind)
    assert holds(json.loads(answer.headers[HEADER]))
    if "json" in kind:
        assert holds(json.loads(answer.text)["warnings"])
        assert answer.parse().text == ""


@pytest.mark.real_time
def test_an_answer_without_warnings_has_neither_member_nor_header(client, speech):
    answer = client.audio.transcriptions.with_raw_response.create(model="whisper", file=speech)
    assert HEADER not in answer.headers
    assert "warnings" not in json.loads(answer.text)


@pytest.mark.real_time
def test_the_last_event_of_a_stream_tells_them(client, noise):
    asked = {"model": "whisper_random", "file": noise, "stream": True, "extra_body": {"hotwords": NAMES}}
    *_, done = client.audio.transcriptions.create(**asked)
    assert (done.type, done.text) == ("transcript.text.done", "")
    assert holds(done.warnings)


@pytest.mark.real_time
def test_the_access_log_tells_them(service: Served, client, noise, caplog):
    def told() -> bool:
        lines = [json.loads(one.getMessage()) for one in caplog.records if one.name == "triolet.access"]
        return any(holds(line.get("warnings", [])) for line in lines)

    with caplog.at_level(logging.INFO, "triolet.access"), service.when(told):
        raw(client, noise, "text")


def test_speech_without_text_is_told_with_its_times():
    lost = [Stretch(start=2.0 * at, end=2.0 * at + 1, kind="failed") for at in range(10)]
    transcript = Transcript(
        text="", language=None, language_probability=None, duration=40.0, segments=(), coverage=(*lost,)
    )
    (told,) = warnings_of(transcript, ())
    assert told.startswith("10.00 s of the audio may be speech, but have no text: 0.00 to 1.00, 2.00 to 3.00, ")
    assert told.endswith("14.00 to 15.00 s and 2 others")


SENTENCES = st.builds(str.__mul__, st.text(max_size=12), st.integers(0, 60))


@given(st.lists(SENTENCES, min_size=1, max_size=40))
@settings(max_examples=60, deadline=None)
def test_the_header_is_short_printable_ascii_whatever_the_sentences_are(sentences):
    """Line ends, marks of other scripts, and names of files that would be headers of their own."""
    value = in_header([*sentences, "a\r\nset-cookie: x=1\x7f\u2028"])
    assert value.isascii()
    assert value.isprintable()
    assert len(value) <= 4_096
    *told, last = json.loads(value)
    assert all(one.startswith(each.removesuffix("...")) for one, each in zip(sentences, told, strict=False))
    left_out = len(sentences) + 1 - len(told)
    assert last == (f"and {left_out} more" if left_out > 1 else "a\r\nset-cookie: x=1\x7f\u2028") or left_out == 1


def test_a_header_of_many_sentences_takes_no_longer_than_one_of_few(monkeypatch):
    written = []
    monkeypatch.setattr(common.json, "dumps", lambda told: written.append(told) or f'"{told}"')
    assert in_header(["no words"] * 100_000).endswith('"and 99662 more"]')
    assert len(written) < 500
