"""Live audio over a WebSocket: the events of OpenAI's realtime transcription, as clients send them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from .base import Body, Language, Name, Short, Text, Unread, unused, up_to


class Pcm(Body):
    """16-bit samples, little-endian, mono."""

    type: Literal["audio/pcm"] = "audio/pcm"
    rate: int = Field(default=24_000, ge=8_000, le=96_000)


class G711(Body):
    """8,000 samples a second of 8 bits, by one of the laws of ITU-T G.711."""

    type: Literal["audio/pcmu", "audio/pcma"]
    rate: Literal[8_000] = 8_000


class LiveModel(Body):
    """The model that transcribes, the language, the prompt, which is text that is taken to come before the audio, and
    the keywords, which come before every window."""

    model: Name | None = None
    language: Language = None
    prompt: Text | None = None
    keywords: Annotated[list[Text], up_to(128)] | None = None
    delay: Short | None = unused()


class TurnDetection(Body):
    """The server finds where somebody speaks."""

    type: Literal["server_vad", "semantic_vad"] = "server_vad"
    silence_duration_ms: int | None = Field(
        default=None, ge=100, le=10_000, description="The silence that ends an utterance."
    )
    threshold: float | None = unused()
    prefix_padding_ms: int | None = unused()
    idle_timeout_ms: int | None = unused()
    eagerness: Short | None = unused()
    create_response: bool | None = unused()
    interrupt_response: bool | None = unused()


class AudioInput(Body):
    """The form of the audio, and its treatment. ``turn_detection`` of null: the client says where a turn ends."""

    format: Pcm | G711 | None = None
    transcription: LiveModel | None = None
    turn_detection: TurnDetection | None = None
    noise_reduction: Unread = unused()


class Audio(Body):
    """The audio of a session."""

    input: AudioInput | None = None


def _is_told(name: Any) -> Any:
    if name == "item.input_audio_transcription.logprobs":
        raise ValueError(f"{name} is not available for live audio; allowed: triolet.provisional")
    return name


Include = Annotated[Literal["triolet.provisional"], BeforeValidator(_is_told)]
Includes = Annotated[list[Include], up_to(8)]


class Session(Body):
    """A session."""

    type: Literal["transcription"] = "transcription"
    audio: Audio | None = None
    include: Includes | None = None


class _ClientEvent(Body):
    event_id: str | None = Field(default=None, max_length=512)


class Update(_ClientEvent):
    """Changes the session."""

    type: Literal["session.update"]
    session: Session


class Append(_ClientEvent):
    """More audio, in base64."""

    type: Literal["input_audio_buffer.append"]
    audio: str


class Commit(_ClientEvent):
    """The turn ends here."""

    type: Literal["input_audio_buffer.commit"]


class Clear(_ClientEvent):
    """The audio of this turn is not wanted."""

    type: Literal["input_audio_buffer.clear"]


ClientEvent = Annotated[Update | Append | Commit | Clear, Field(discriminator="type")]
