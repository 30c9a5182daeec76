"""The server of ``clients.py``, the files that are sent to it, and the judgement of what came of a request."""

from __future__ import annotations

import base64
import json
import re
import struct
import subprocess
import time
import wave
import zlib
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv/bin/python"
TINY = {"vision": "llava", "ranks": "bert_reranker"}
MAKE = "import sys; from tiny import make_checkpoint as make; [make(*one.split('=')) for one in sys.argv[1:]]"
TEMPLATE = """{% if tools %}<|im_start|>system
Tools: {{ tools | tojson }}
Call one as <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@dataclass(frozen=True)
class Outcome:
    """The end of a request: whether it is right, and in words."""

    client: str
    request: str
    right: bool
    became: str


@dataclass(frozen=True)
class World:
    """The address of a server, the folder of the files that are sent to it, and the words that are spoken there."""

    url: str
    folder: Path
    words: str

    def heard(self, text: str) -> bool:
        """True if ``text`` has three quarters of the words, and few others."""
        said, got = (re.sub(r"[^a-z ]", "", one.lower()).split() for one in (self.words, text))
        same = sum(block.size for block in SequenceMatcher(None, said, got, autojunk=False).get_matching_blocks())
        return same >= 0.75 * len(said) and len(got) <= 1.25 * len(said)

    def data(self, name: str) -> str:
        kind = "image/png" if name.endswith("png") else "audio/wav"
        return f"data:{kind};base64,{base64.b64encode((self.folder / name).read_bytes()).decode()}"

    @classmethod
    @contextmanager
    def serving(
        cls, folder: Path, whisper: str, chat: str, vectors: str, recording: Path, words: str
    ) -> Iterator[World]:
        """Runs the server. Stops it at the end."""
        _draw(folder)
        _record(folder, recording)
        (folder / "template.jinja").write_text(TEMPLATE)
        made = [f"{family}={folder / name}" for name, family in TINY.items()]
        subprocess.run([PYTHON, "-c", MAKE, *made], check=True, cwd=ROOT / "benchmarks")
        models = {"speech": whisper, "chat": chat, "vectors": vectors} | {name: str(folder / name) for name in TINY}
        command = ["nice", "-n", "10", str(PYTHON), "-m", "triolet", "serve", "--preload", "--port", "0"]
        command += ["--chat-template", f"chat={folder / 'template.jinja'}"]
        command += [part for name, path in models.items() for part in ("--model", f"{name}={path}")]
        with (folder / "log.txt").open("w+") as log:
            process = subprocess.Popen(command, stderr=log)
            read = (folder / "log.txt").read_text
            try:
                while not (found := re.search(r"http://[\d.]+:\d+", read())):
                    if process.poll() is not None:
                        raise SystemExit(f"the server ended: {read()}")
                    time.sleep(0.1)
                yield cls(f"{found[0]}/v1", folder, words)
            finally:
                process.terminate()
                process.wait(timeout=60)


def _draw(folder: Path) -> None:
    """Writes a slope of grays with 16 and with 8 bits, and a white image."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    grays = bytes(range(0, 256, 8))
    deep = bytes(part for gray in grays for part in (gray, gray))
    for name, bits, row in (("deep", 16, deep), ("usual", 8, grays), ("white", 8, b"\xff" * 32)):
        head, rows = struct.pack(">IIBBBBB", 32, 32, bits, 0, 0, 0, 0), zlib.compress((b"\0" + row) * 32)
        png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
        (folder / f"{name}.png").write_bytes(png)


def _record(folder: Path, recording: Path) -> None:
    """Writes silence, and the recording: whole, cut, beside its negative, and with a sample that is no number."""
    with wave.open(str(recording)) as file:
        rate, samples = file.getframerate(), array("h", file.readframes(file.getnframes()))
    floats = array("f", (one / 32768 for one in samples))
    floats[len(floats) // 2] = float("nan")
    both = array("h", (part for one in samples for part in (one, min(-one, 32767))))
    made = [("speech", 1, 1, samples), ("silence", 1, 1, array("h", bytes(10 * rate)))]
    for name, kind, channels, data in (*made, ("antiphase", 1, 2, both), ("nan", 3, 1, floats)):
        size, each = len(data) * data.itemsize, channels * data.itemsize
        form = struct.pack("<HHIIHH", kind, channels, rate, rate * each, each, 8 * data.itemsize)
        head = b"RIFF" + struct.pack("<I", size + 36) + b"WAVEfmt \x10\0\0\0" + form + b"data" + struct.pack("<I", size)
        (folder / f"{name}.wav").write_bytes(head + data.tobytes())
    whole = (folder / "speech.wav").read_bytes()
    (folder / "cut.wav").write_bytes(whole[: len(whole) // 2])


def judged(client: str, request: str, send: Callable[[], Any], wanted: Callable[[Any], object] | str) -> Outcome:
    """Sends a request. Returns what became of it. ``wanted``: what holds for the answer, or what the refusal says."""
    try:
        got = send()
        right = callable(wanted) and bool(wanted(got))
        return Outcome(client, request, right, "answered" if right else f"WRONG: {got!r}"[:400])
    except Exception as error:  # noqa: BLE001
        body = getattr(error, "body", None)
        told = body if isinstance(body, dict) else {"message": str(error)}
        return _refused(client, request, {**told, "status": getattr(error, "status_code", None)}, wanted)


def _refused(client: str, request: str, error: dict[str, Any], wanted: object) -> Outcome:
    """Judges a refusal: it is the caller's fault, in OpenAI's form, and says what to send."""
    kind, said = (error["status"], error.get("type")), error.get("message") or ""
    right = kind == (400, "invalid_request_error") and isinstance(wanted, str) and wanted in said
    return Outcome(client, request, right, f"{'refused' if right else 'FAILED'}: {kind} {' '.join(said.split())}")


def node(world: World, packages: str) -> list[Outcome]:
    """Sends the requests of ``clients.mjs``, and returns what became of them."""
    command = ["node", Path(__file__).with_name("clients.mjs"), world.url, world.folder, packages]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = []
    for one in map(json.loads, ran.stdout.splitlines()):
        about = one["client"], one["request"]
        if "error" in one:
            found.append(_refused(*about, one["error"], one["wanted"]))
            continue
        right = one["right"] and ("text" not in one or world.heard(one["text"]))
        found.append(Outcome(*about, right, "answered" if right else f"WRONG: {one['got']}"[:400]))
    return found
