"""What a live session does, as its client may change it."""

from __future__ import annotations

from typing import Any

from attrs import evolve, field, frozen

from ..schemas import realtime as bodies


@frozen(kw_only=True)
class Settings:
    """What a session does: OpenAI's defaults, until the client changes them."""

    format: bodies.Pcm | bodies.G711 = field(factory=bodies.Pcm)
    model: str | None = None
    language: str | None = None
    prompt: str | None = None
    turns: bodies.TurnDetection | None = field(factory=bodies.TurnDetection)  # None: the client ends them
    include: tuple[str, ...] = ()

    def updated(self, session: bodies.Session) -> Settings:
        """These settings with what ``session`` says."""
        given: dict[str, Any] = {}
        said = session.audio.input if session.audio is not None else None
        if said is not None and said.format is not None:
            given["format"] = said.format
        if said is not None and said.transcription is not None:
            given.update(language=said.transcription.language, prompt=said.transcription.prompt)
            given["model"] = said.transcription.model or self.model
        if said is not None and "turn_detection" in said.model_fields_set:
            given["turns"] = said.turn_detection
        if session.include is not None:
            given["include"] = tuple(session.include)
        return evolve(self, **given)

    def told(self, name: str) -> dict[str, Any]:
        """As the session's events tell it."""
        heard = {"model": self.model, "language": self.language, "prompt": self.prompt}
        return {
            "id": name,
            "object": "realtime.transcription_session",
            "type": "transcription",
            "audio": {
                "input": {
                    "format": self.format.model_dump(),
                    "transcription": heard,
                    "turn_detection": None
                    if self.turns is None
                    else self.turns.model_dump(exclude_unset=True) | {"type": self.turns.type},
                    "noise_reduction": None,
                }
            },
            "include": list(self.include) or None,
        }

    def options(self) -> dict[str, Any]:
        """The arguments of `Engine.live`."""
        silence = self.turns.silence_duration_ms if self.turns is not None else None
        given = {
            "language": self.language,
            "initial_prompt": self.prompt,
            "endpoint_silence": None if silence is None else silence / 1_000,
        }
        return {"rate": self.format.rate, **{name: value for name, value in given.items() if value is not None}}
