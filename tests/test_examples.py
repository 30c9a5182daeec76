"""The examples and the README's example run as a user would run them, from elsewhere; the services in a process of
their own."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from triolet import CheckpointError, Engine, EngineConfig, Event, LiveText, demo
from triolet.api.inputs.audio import load_audio
from triolet.core.events import RequestEnded, RequestQueued
from triolet.models.executor import TorchExecutor

from .checkpoints.families import make_checkpoint

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 300
SAMPLE = demo.samples()[0].path
TOO_MUCH = 80 * 2**20  # bytes; the services take 64 MiB


@pytest.fixture
def run(tmp_path, monkeypatch, capsys, caplog):
    """Runs an example with some arguments and returns the lines of standard output and of standard error, where Python
    would write warnings of the log too. Here and not in a process of its own, which would import torch each time."""

    def run(
        example: str, *arguments: str | int | Path, status: int = 0, typed: str = ""
    ) -> tuple[list[str], list[str]]:
        monkeypatch.setattr(sys, "argv", [example, *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        monkeypatch.chdir(tmp_path)
        ended: object = None
        capsys.readouterr()  # what making a checkpoint wrote
        with caplog.at_level(logging.WARNING):
            try:
                runpy.run_path(str(ROOT / "examples" / example), run_name="__main__")
            except SystemExit as end:
                ended = end.code
        written = capsys.readouterr()
        errors = [*written.err.splitlines(), *caplog.messages, *([ended] if isinstance(ended, str) else [])]
        assert (isinstance(ended, str) or ended or 0) == status, errors
        return written.out.splitlines(), errors

    return run


SAMPLES = demo.samples()[:3]


@pytest.mark.parametrize(
    ("example", "arguments"),
    [
        ("transcribe_many.py", []),
        ("script.py", []),
        *(("anyio_group.py", [backend, *(sample.path for sample in SAMPLES)]) for backend in ("asyncio", "trio")),
    ],
)
def test_an_example_gives_a_line_for_each_recording(run, monkeypatch, example, arguments):
    """Plain Python in their order, the others as each is done."""
    monkeypatch.setattr(demo, "samples", lambda: SAMPLES)
    lines, errors = run(example, *arguments)
    assert not errors
    names, expected = [line.split(" ")[0] for line in lines], [sample.path.name for sample in SAMPLES]
    assert (names if example == "script.py" else sorted(names)) == sorted(expected)


def test_stream_tokens_writes_the_text_and_what_was_held(run):
    lines, errors = run("stream_tokens.py")
    assert not errors
    *text, summary = lines
    assert "".join(text).strip()
    counts = re.fullmatch(r"(\d+) tokens; the engine held (\d+\.\d) MiB on \S+", summary)
    assert counts, summary
    assert int(counts[1]) > 1
    assert float(counts[2]) > 1


@pytest.mark.parametrize(
    ("example", "arguments"),
    [
        ("transcribe_many.py", ["--model", "{}"]),
        ("anyio_group.py", ["--model", "{}", "trio"]),
        ("stream_tokens.py", ["{}"]),
        ("trio_service.py", ["--model", "{}", "0"]),
        ("microphone.py", ["{}"]),
    ],
)
def test_an_example_takes_a_model(example, arguments, tmp_path, monkeypatch):
    """The one that is named is looked for, and no other."""
    absent = str(tmp_path / "my model")
    monkeypatch.setattr(sys, "argv", [example, *(word.format(absent) for word in arguments)])
    with pytest.RaisesGroup(CheckpointError, allow_unwrapped=True, flatten_subgroups=True) as caught:
        runpy.run_path(str(ROOT / "examples" / example), run_name="__main__")
    assert "my model" in str(caught.value)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The folder of a tiny random checkpoint of a family."""
    return lambda family: make_checkpoint(family, tmp_path_factory.mktemp(family))


def test_chat_answers_each_line_and_finds_what_was_said_before_computed(run, checkpoint):
    """Two lines in: their answers on standard output, prompts and counts beside it."""
    lines, errors = run("chat.py", checkpoint("qwen3"), "20", typed="hi there\nand now?\n")
    assert len("".join(lines)) > 20
    counts = re.fullmatch(r"(?:> ){3}(\d+) tokens computed, (\d+) found computed", "".join(errors))
    assert counts, errors
    assert int(counts[2]) >= 16


def test_describe_image_answers_every_question_and_encodes_once(run, checkpoint, tmp_path):
    picture = tmp_path / "red.png"
    Image.new("RGB", (40, 60), (200, 30, 30)).save(picture)
    questions = ["What is it?", "Why?"]
    lines, errors = run("describe_image.py", checkpoint("qwen2_5_vl"), picture, *questions)
    assert not errors
    assert sorted(line for line in lines if not line.startswith("  ")) == [*questions, "images encoded: 1"]
    assert len(lines) == 5


def test_search_ranks_the_nearest_texts(run, checkpoint):
    """Of six texts the reranker reads five; the best comes first."""
    texts = ["a cat", "two dogs", "three hats", "the mat", "on and on", "in the hat"]
    models = (checkpoint("bert"), checkpoint("bert_reranker"))
    lines, errors = run("search.py", *models, "a cat?", typed="\n".join(texts))
    assert not errors
    found = [re.fullmatch(r" *(-?\d+\.\d{3})  (.*)", line) for line in lines]
    assert all(found), lines
    scores = [float(match[1]) for match in found]
    assert scores == sorted(scores, reverse=True)
    assert len({match[2] for match in found} & set(texts)) == 5


def test_two_models_take_turns_where_only_one_fits_and_answer_every_file(run, checkpoint):
    samples = [sample.path for sample in demo.samples()[:3]]
    for mebibytes, speech in ((100, "absent"), (200, "ready")):
        lines, errors = run("two_models.py", checkpoint("qwen3"), mebibytes, *samples)
        assert sorted(line.partition(":")[0] for line in lines) == sorted(path.name for path in samples)
        assert errors == [f"speech: {speech}, loaded 1 times", "chat: ready, loaded 1 times"]


@pytest.mark.parametrize(
    ("example", "arguments", "status", "told"),
    [
        ("transcribe_many.py", [ROOT / "README.md", SAMPLE], 1, r"README\.md: "),
        ("anyio_group.py", [SAMPLE], 2, r"usage: (.|\n)*choose from"),  # a file stands where the event loop belongs
        ("describe_image.py", ["llava", ROOT / "README.md"], 1, r".*README\.md is not an image that can be read"),
        ("two_models.py", ["qwen3", 40, SAMPLE], 1, r"(.|\n)*memory_budget=41943040"),
    ],
)
def test_what_cannot_work_is_told_and_ends_with_1_or_as_wrong_usage(run, checkpoint, example, arguments, status, told):
    """The other files are transcribed."""
    families = ("llava", "qwen3")
    lines, errors = run(example, *(checkpoint(each) if each in families else each for each in arguments), status=status)
    assert [line.split(" ")[0] for line in lines] == ([SAMPLE.name] if example == "transcribe_many.py" else [])
    assert re.match(told, "\n".join(errors)), errors
    assert len(errors) == 1 or status == 2 or example == "two_models.py"


@pytest.mark.real_time
def test_microphone_writes_what_is_piped_in(tmp_path):
    """A recording's samples as raw PCM, in pieces that cut samples apart; in a process of its own, whose standard input
    they are."""
    sample = next(sample for sample in demo.samples() if sample.path.stem == "en-command")
    samples = (load_audio(sample.path) * 32767).astype("<i2").tobytes()
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "microphone.py"],
        cwd=tmp_path,
        input=samples,
        capture_output=True,
        timeout=SECONDS,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode().strip() == sample.text


def test_microphone_shows_on_a_terminal_what_is_not_stable_yet(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdout", Terminal())
    write = runpy.run_path(str(ROOT / "examples" / "microphone.py"))["write"]
    seen = {"words": (), "start": None, "end": None, "position": 1.0, "language": "en", "utterance": 0}
    write(LiveText(stable=" the cat", provisional=" sad", **seen))
    write(LiveText(stable=" sat.", provisional="", ends_utterance=True, **seen))
    written = sys.stdout.getvalue()
    assert written.replace("\x1b[90m", "").replace("\x1b[0m", "") == (
        "\x1b[J the cat\x1b7 sad\x1b8" + "\x1b[J sat.\n\x1b7\x1b8"
    )


TELLING = """
import runpy, sys

def tell(told):
    if told.exc_type is KeyboardInterrupt:
        print("lost", flush=True)
    else:
        sys.__unraisablehook__(told)

sys.unraisablehook = tell
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs an example. Python loses a ^C that it hears in a callback of the collector, and says so here. Of any other error
that it loses, it prints the traceback."""


@pytest.fixture(scope="module")
def serve(tmp_path_factory):
    """Starts an example that serves, on a free port; interrupts it at the end, again where Python has lost that, and it
    must end well."""

    @contextmanager
    def serve(example: str, announcement: str) -> Iterator[int]:
        process = subprocess.Popen(
            [sys.executable, "-c", TELLING, ROOT / "examples" / example, "--model", demo.checkpoint(), "0"],
            cwd=tmp_path_factory.mktemp("elsewhere"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        watchdog = threading.Timer(SECONDS, process.kill)
        watchdog.start()
        lines: list[str] = []
        try:
            port = None
            for line in process.stdout:
                lines.append(line)
                if port := re.search(announcement, line):
                    break
            assert port, lines
            yield int(port[1])
            process.send_signal(signal.SIGINT)
            for line in process.stdout:
                lines.append(line)
                if line == "lost\n":
                    process.send_signal(signal.SIGINT)
            assert process.wait(SECONDS) in {0, -signal.SIGINT}, lines
            assert not any("Traceback" in line or "Exception ignored" in line for line in lines), lines
        finally:
            watchdog.cancel()
            process.kill()
            process.wait()
            process.stdout.close()

    return serve


@pytest.fixture(scope="module")
def fastapi_port(serve):
    """Of one server for all that is sent to it."""
    with serve("fastapi_app.py", r"running on http://127\.0\.0\.1:(\d+)") as port:
        yield port


def post(port: int, body: bytes, kind: str = "audio/wav") -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/transcribe", body, {"Content-Type": kind})
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


@pytest.mark.real_time
def test_fastapi_app_transcribes_and_answers_errors_with_their_status(fastapi_port):
    sample = demo.samples()[0]
    audio = sample.path.read_bytes()
    status, found = post(fastapi_port, audio)
    assert status == 200
    assert (found["language"], round(found["duration"], 1)) == (sample.language, round(sample.duration, 1))
    assert found["text"] == "".join(segment["text"] for segment in found["segments"]).strip()
    status, found = post(fastapi_port, b"no audio at all, " * 20)
    assert (status, found["error"]) == (415, "UnsupportedAudio")
    status, found = post(fastapi_port, b"--x", "multipart/form-data; boundary=x")
    assert (status, found["error"]) == (415, "UnsupportedAudio")
    assert found["message"].startswith("a form was sent; send the file itself as the body")
    for sent in (audio, audio[:1000]):  # the second one hangs up in its upload
        with socket.create_connection(("127.0.0.1", fastapi_port)) as client:
            head = f"POST /transcribe HTTP/1.1\r\nHost: a\r\nContent-Length: {len(audio)}\r\n\r\n"
            client.sendall(head.encode() + sent)
    assert post(fastapi_port, audio)[0] == 200


@pytest.mark.real_time
def test_fastapi_app_answers_a_client_that_sends_too_much(fastapi_port):
    """One that listens only when it has sent all, too; the next one is served."""
    status, found = post(fastapi_port, bytes(TOO_MUCH))
    assert (status, found["error"]) == (413, "RequestTooLarge")
    assert post(fastapi_port, demo.samples()[0].path.read_bytes())[0] == 200


@pytest.mark.real_time
@pytest.mark.parametrize(("end", "status"), [("the client hangs up", 499), ("the server is forced to stop", 503)])
def test_fastapi_app_withdraws_a_request_that_nobody_waits_for(end, status, caplog, monkeypatch):
    """Called as a server calls it, so that the end comes when the request runs: its first step lasts until it has
    ended. The log tells of a hang-up, of which uvicorn tells nothing. A cancellation is answered, and goes on."""
    caplog.set_level(logging.INFO, "triolet.web")
    step, ended = TorchExecutor.step, threading.Event()

    def held(executor: TorchExecutor, plan: Any) -> Any:
        assert ended.wait(SECONDS), "nobody withdraws the request"
        return step(executor, plan)

    monkeypatch.setattr(TorchExecutor, "step", held)
    app = runpy.run_path(str(ROOT / "examples" / "fastapi_app.py"))["app"]
    recording = max(demo.samples(), key=lambda sample: sample.duration).path.read_bytes()
    messages = [{"type": "http.request", "body": recording, "more_body": False}]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await (accepted if end == "the client hangs up" else asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def main() -> None:
        def observe(event: Event) -> None:
            if isinstance(event, RequestQueued):
                loop.call_soon_threadsafe(accepted.set)
            elif isinstance(event, RequestEnded):
                ends.append(event.outcome)
                ended.set()

        loop = asyncio.get_running_loop()
        async with Engine(demo.checkpoint(), config=EngineConfig(observer=observe)) as engine:
            scope = {"type": "http", "method": "POST", "path": "/transcribe", "headers": [], "query_string": b""}
            before = asyncio.all_tasks()
            request = asyncio.create_task(app(scope | {"state": {"engine": engine}}, receive, send))
            if end == "the server is forced to stop":
                await accepted.wait()
                for task in asyncio.all_tasks() - before:  # what asyncio.run does
                    task.cancel()
            await asyncio.wait([request])
            assert request.cancelled() == (end == "the server is forced to stop")

    ends: list[str] = []
    accepted = asyncio.Event()
    asyncio.run(main())
    assert sent[0]["status"] == status
    assert ("a client hung up; its request is withdrawn" in caplog.messages) == (end == "the client hangs up")
    assert ends == ["aborted"]  # the end of the engine's block would have let it finish


@pytest.mark.real_time
def test_trio_service_answers_what_it_is_sent_too_much_too(serve):
    """The client listens only when it has sent all."""
    sample = demo.samples()[0]

    def ask(port: int, data: bytes) -> dict[str, Any]:
        with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as client:
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
            with client.makefile("rb") as answer:
                return json.load(answer)

    with serve("trio_service.py", r"listening on port (\d+)") as port:
        assert ask(port, b"")["error"] == "UnsupportedAudio"
        assert ask(port, bytes(TOO_MUCH))["error"] == "RequestTooLarge"
        assert ask(port, sample.path.read_bytes())["language"] == sample.language


def test_the_example_of_the_readme_runs(tmp_path, monkeypatch, capsys, caplog):
    """From elsewhere; it prints what stands below it, and warns of nothing."""
    caplog.set_level(logging.WARNING, "triolet")  # whatever level another test has left
    ((example, expected),) = re.findall(
        r"^```python\n(.*?)^```\n\n```text\n(.*?)^```",
        (ROOT / "README.md").read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "README.md", "exec"), {"__name__": "__main__"})
    assert (capsys.readouterr(), caplog.messages) == ((expected, ""), [])
