"""OpenAI's own client, as it is published, over the server: live audio by its realtime connection."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
import soundfile
import soxr

from triolet import Transcript

from .openai_client import PATIENT_SOCKET, openai_client
from .served import Served

pytestmark = [
    pytest.mark.real_time,
    pytest.mark.filterwarnings("ignore:connect\\(\\) must be used"),  # so OpenAI's client does
]

RATE = 24_000
STEP = RATE // 5 * 2  # bytes of 0.2 s
COMPLETED = "conversation.item.input_audio_transcription.completed"
DELTA = "conversation.item.input_audio_transcription.delta"


@pytest.fixture(scope="module")
def transcript(service: Served, speech) -> Transcript:
    return service.engine("whisper", lambda engine: engine.transcribe(speech))


@pytest.fixture(scope="module")
def sound(speech) -> bytes:
    """The sentence as OpenAI's clients send it: PCM of 16 bits, 24,000 Hz."""
    samples, rate = soundfile.read(speech, dtype="int16")
    return soxr.resample(samples, rate, RATE).astype("<i2").tobytes()


def connect(client: openai.OpenAI, model: str) -> Any:
    intent = {"intent": "transcription"}
    return client.realtime.connect(model=model, extra_query=intent, websocket_connection_options=PATIENT_SOCKET)


@pytest.fixture
def connection(service: Served) -> Iterator[Any]:
    with openai_client(service) as client:
        with connect(client, "whisper") as connected:
            assert next(iter(connected)).type == "session.created"
            yield connected


def set_up(connection: Any, turns: dict[str, Any] | None) -> None:
    heard = {"model": "whisper", "language": "en"}
    given = {"format": {"type": "audio/pcm", "rate": RATE}, "transcription": heard, "turn_detection": turns}
    connection.session.update(session={"type": "transcription", "audio": {"input": given}})
    assert next(iter(connection)).type == "session.updated"


def say(connection: Any, sound: bytes) -> None:
    for start in range(0, len(sound), STEP):
        connection.input_audio_buffer.append(audio=base64.b64encode(sound[start : start + STEP]).decode())


def until_complete(connection: Any) -> list[Any]:
    """The events up to the turn's whole text."""
    told = []
    for event in connection:
        told.append(event)
        assert event.type != "error", event
        if event.type == COMPLETED:
            return told
    raise AssertionError(f"the connection ended after {[event.type for event in told]}")


def test_a_turn_that_the_client_ends_has_the_text_of_the_engine(connection, sound, transcript):
    set_up(connection, None)
    say(connection, sound)
    connection.input_audio_buffer.commit()
    told = until_complete(connection)
    assert [one.type for one in told if one.type != DELTA] == [
        "input_audio_buffer.committed",
        "conversation.item.added",
        COMPLETED,
    ]
    assert told[-1].transcript == "".join(one.delta for one in told if one.type == DELTA) == transcript.text
    assert {one.content_index for one in told if one.type in (DELTA, COMPLETED)} == {0}, "an item has one content"


def test_a_turn_in_which_nobody_is_heard_says_what_helps(connection):
    noise = np.random.default_rng(0).normal(0, 300, RATE).astype("<i2").tobytes()
    set_up(connection, None)
    say(connection, noise)
    connection.input_audio_buffer.commit()
    completed = until_complete(connection)[-1]
    assert completed.transcript == ""
    (warning,) = completed.warnings
    assert warning.endswith("finds no speech in audio that is not digital silence"), "no hint that cannot be taken"


def test_the_server_finds_where_somebody_speaks(connection, sound, transcript):
    set_up(connection, {"type": "server_vad", "silence_duration_ms": 500})
    say(connection, sound + bytes(2 * RATE * 2))
    told = until_complete(connection)
    kinds = [one.type for one in told if one.type != DELTA]
    assert kinds[:2] == ["input_audio_buffer.speech_started", "input_audio_buffer.speech_stopped"]
    assert told[-1].transcript == "".join(one.delta for one in told if one.type == DELTA) == transcript.text
    assert len({one.item_id for one in told if getattr(one, "item_id", None)}) == 1
