"""``triolet pull`` and ``triolet models``: huggingface_hub's own code, over a server that stands in for the hub."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from triolet import demo

SHA = "a" * 40
TOY = {path.name: path.read_bytes() for path in Path(demo.checkpoint()).iterdir()}
FILES = {
    "me/toy": {**TOY, "model.onnx": b"of another program"},
    "me/slow": TOY,
    "me/foreign": {"config.json": b"[]", "model.onnx": b"of another program", "model.safetensors": b""},
    "me/files": {
        "config.json": b"{}",
        "a-Q4.gguf": b"GGUF",
        "b-00001-of-00002.gguf": b"GGUF",
        "b-00002-of-00002.gguf": b"",
    },
}
REACHED, GO_ON = threading.Event(), threading.Event()
RUN = """
import sys
from triolet.api.command_line.main import main
for line in sys.argv[1:]:
    try:
        main(line.split())
    except SystemExit as end:
        print(end.code, flush=True)
"""


class Hub(BaseHTTPRequestHandler):
    """The answers that a download needs."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        kind, model, name = self._asked()
        files = FILES.get(model, {})
        if kind == "revision" and files:
            self._say(json.dumps({"id": model, "sha": SHA, "siblings": []}).encode())
        elif kind == "tree" and files:
            told = [{"type": "file", "path": one, "size": len(data), "oid": _oid(data)} for one, data in files.items()]
            self._say(json.dumps(told).encode())
        elif kind == "resolve" and name in files:
            if model == "me/slow" and self.command == "GET":
                REACHED.set()
                GO_ON.wait(300)
            self._say(files[name], **{"X-Repo-Commit": SHA, "ETag": f'"{_oid(files[name])}"'})
        else:
            self._say(b"", 404, **{"X-Error-Code": "RepoNotFound"})

    def _asked(self) -> tuple[str, str, str]:
        parts = [*urlsplit(self.path).path.removeprefix("/api/models").split("/")[1:], "", "", ""]
        return parts[2], f"{parts[0]}/{parts[1]}", parts[4]

    def _say(self, data: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


def _oid(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


@pytest.fixture
def hub() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def environment(hub: str, folder: Path) -> dict[str, str]:
    others = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return others | {"HF_ENDPOINT": hub, "HF_HOME": str(folder)}


@pytest.mark.real_time
def test_an_interrupted_download_ends_at_once(hub: str, tmp_path: Path) -> None:
    """Though it would go on for minutes. A shell calls this status 130."""
    command = [sys.executable, "-c", RUN, "pull me/slow"]
    with subprocess.Popen(command, env=environment(hub, tmp_path), stderr=subprocess.DEVNULL) as process:
        try:
            assert REACHED.wait(300)
            process.send_signal(signal.SIGINT)
            assert process.wait(300) == -signal.SIGINT
        finally:
            process.kill()
            GO_ON.set()


@pytest.mark.real_time
def test_a_model_is_downloaded_and_listed_with_its_size_and_what_can_open_it(hub: str, tmp_path: Path) -> None:
    """In a process of its own, since huggingface_hub reads its settings when it is imported. Before, there is none."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, "models", "pull me/toy me/foreign", "pull me/nobody", "models"],
        capture_output=True,
        encoding="utf-8",
        timeout=300,
        check=True,
        env=environment(hub, tmp_path),
    )
    none, toy, foreign, failed, absent, *listed, ended = done.stdout.splitlines()
    assert (none, failed, absent, ended) == ("0", "1", "1", "0")
    size = f"{sum(map(len, TOY.values())) / 2**20:.1f} MiB"
    place = tmp_path / "hub" / "models--me--toy" / "snapshots" / SHA
    assert toy == f"me/toy  {size}  {place}  can be opened"
    assert sorted(path.name for path in place.iterdir()) == sorted(TOY)
    why = "cannot be opened: me/foreign/config.json holds a list; a checkpoint's settings are a JSON object"
    assert why in foreign
    assert [line.split()[0] for line in listed] == ["me/foreign", "me/toy"]
    assert why in listed[0]
    assert listed[1].endswith(f"  {size}  can be opened")
    told = [line for line in done.stderr.splitlines() if line.startswith("triolet: ")]
    assert told[0] == f"triolet: there is no model in {tmp_path}/hub; download one: triolet pull openai/whisper-base"
    assert told[1].startswith(
        "triolet: there is no folder 'me/nobody', and it could not be downloaded from the hub: Rep"
    )
    assert len(told) == 2


@pytest.mark.real_time
def test_a_gguf_file_is_downloaded_alone_or_with_its_parts(hub: str, tmp_path: Path) -> None:
    """These files are damaged, which is told of the local copies. Of a repository with such files one is asked for."""
    names = ("me/files/a-Q4.gguf", "me/files/b-00002-of-00002.gguf", "me/files/c.gguf", "me/files")
    done = subprocess.run(
        [sys.executable, "-c", RUN, *(f"pull {name}" for name in names)],
        capture_output=True,
        encoding="utf-8",
        timeout=300,
        check=True,
        env=environment(hub, tmp_path),
    )
    place = tmp_path / "hub" / "models--me--files" / "snapshots" / SHA
    assert sorted(path.name for path in place.iterdir()) == sorted(FILES["me/files"])
    alone, part, absent, whole = [line for line in done.stderr.splitlines() if line.startswith("triolet: ")]
    assert alone.startswith(f"triolet: {place}/a-Q4.gguf is a damaged GGUF file")
    assert part.startswith(f"triolet: {place}/b-00001-of-00002.gguf is a damaged GGUF file")
    files = "a-Q4.gguf, b-00001-of-00002.gguf, b-00002-of-00002.gguf. Give one of them, as in me/files/a-Q4.gguf"
    assert absent == f"triolet: me/files on the hub has no c.gguf; its GGUF files are {files}"
    assert whole == f"triolet: me/files on the hub has no weights but those of GGUF files; its GGUF files are {files}"
