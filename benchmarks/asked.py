"""A server of OpenAI's shape, asked with plain requests, for `clients.py`."""

from __future__ import annotations

import json
import urllib.request
import uuid
import wave
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KEY = "none"
QUESTION = [{"role": "user", "content": "hi"}]
TOKENS = 8
RANKING = {"query": "what", "documents": ["a b", "c d"]}
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"type": "string", "enum": ["red", "green"]}},
    "required": ["colour"],
    "additionalProperties": False,
}

TOOL = {"type": "function", "function": {"name": "paint", "description": "Paints it.", "parameters": SCHEMA}}
MUST = {"type": "function", "function": {"name": "paint"}}


def rounded(vector: Any) -> list[float]:
    """The first numbers of a vector."""
    return [round(float(one), 3) for one in list(vector)[:4]]


@dataclass(frozen=True)
class Asked:
    """Where to ask, for which models, and for what."""

    url: str
    speech: str
    chat: str
    tools: str
    vectors: str
    rerank: str
    recording: Path
    language: str

    @property
    def base(self) -> str:
        """What clients call the base URL."""
        return f"{self.url}/v1"

    def expected(self, call: str, told: Any) -> bool:
        """Whether ``told`` is what the server says to a plain request; ``call`` begins with what was asked for."""
        kind = call.replace(",", " ").split()[0]
        if kind in ("structured", "tool"):
            return told in ("red", "green")
        if kind in ("transcription", "realtime"):
            return " ".join(told.split()) == self.plain("transcription")
        return told == self.plain(kind)

    def plain(self, kind: str) -> Any:
        """The answer to a plain request."""
        if kind == "transcription":
            return " ".join(self._heard().split())
        if kind == "chat":
            asked = {"model": self.chat, "messages": QUESTION, "temperature": 0, "max_tokens": TOKENS}
            return self._json("/chat/completions", asked)["choices"][0]["message"]["content"]
        if kind == "vectors":
            return rounded(self._json("/embeddings", {"model": self.vectors, "input": "hi"})["data"][0]["embedding"])
        return self._json("/rerank", {"model": self.rerank, **RANKING})["results"][0]["index"]

    def samples(self) -> tuple[bytes, int]:
        """The recording as PCM of 16 bits, and its rate."""
        with wave.open(str(self.recording), "rb") as file:
            assert (file.getnchannels(), file.getsampwidth()) == (1, 2), "the recording is a mono WAV of 16 bits"
            return file.readframes(file.getnframes()), file.getframerate()

    def _heard(self) -> str:
        mark = uuid.uuid4().hex
        name = f'--{mark}\r\ncontent-disposition: form-data; name="model"\r\n\r\n{self.speech}\r\n'
        file = f'--{mark}\r\ncontent-disposition: form-data; name="file"; filename="speech.wav"\r\n\r\n'
        body = (name + file).encode() + self.recording.read_bytes() + f"\r\n--{mark}--\r\n".encode()
        return str(self._answer("/audio/transcriptions", body, f"multipart/form-data; boundary={mark}")["text"])

    def _json(self, path: str, body: dict[str, Any]) -> Any:
        return self._answer(path, json.dumps(body).encode(), "application/json")

    def _answer(self, path: str, body: bytes, kind: str) -> Any:
        headers = {"content-type": kind, "authorization": f"Bearer {KEY}"}
        request = urllib.request.Request(self.base + path, body, headers)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)
