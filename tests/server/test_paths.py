"""What clients are told of errors: no path of this machine; and what the log is told: all of it, in a line."""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from triolet import Engine, Engines, ModelSpec
from triolet.core import errors
from triolet.core.errors import CheckpointError, InvalidRequest, TrioletError, UnknownModel
from triolet.server.manners.limits import Flood
from triolet.server.manners.paths import known_folders, without_paths
from triolet.server.problems import BadBody, Problem, Refusal, problem_of, report
from triolet.server.server import Server
from triolet.server.settings import ServerSettings

from .connected import PATIENCE, answer, serving_on
from .served import Served, served

pytestmark = pytest.mark.real_time

HIDDEN = "(a path of the server)"
LOGGER = "triolet.server"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("there is no folder /srv/models/a; allowed: b", f"there is no folder {HIDDEN}; allowed: b"),
        ("[Errno 2] No such file: '/a b/c d.bin'", f"[Errno 2] No such file: {HIDDEN}"),
        ('File "/usr/lib/x.py", line 3', f"File {HIDDEN}, line 3"),
        ("`/a/b` is none", f"{HIDDEN} is none"),
        ("it lies in /etc/x.", f"it lies in {HIDDEN}."),
        ("(/etc/x)", f"({HIDDEN})"),
        ("path=/etc/x:/etc/y", f"path={HIDDEN}"),
        ("/models: not there", f"{HIDDEN}: not there"),
        ("~/models/x", HIDDEN),
        ("file:///etc/x", HIDDEN),
        ("C:\\models\\x and D:/y", f"{HIDDEN} and {HIDDEN}"),
        ("\\\\host\\share\\x", HIDDEN),
    ],
)
def test_a_path_is_not_told(text: str, told: str) -> None:
    assert without_paths(text) == told


@pytest.mark.parametrize(
    "text",
    [
        "see https://example.org/a/b or http://[::1]/x",
        "text/plain, 5/6 and/or a / b",
        "'image/png'; tokens/s",
        '{"$ref": "#/$defs/a"}',
        "openai/whisper-base",
        "ws://h/v1: no",
    ],
)
def test_what_only_looks_like_a_path_stays(text: str) -> None:
    assert without_paths(text) == text


def test_a_method_of_the_engine_is_named_as_an_endpoint(caplog: pytest.LogCaptureFixture) -> None:
    """And the log has no line more."""
    error = InvalidRequest(
        "ask engine.embed(...) or engine.score; or raise EngineConfig(max_step_tokens=5); template_options has 'a'"
    )
    problem = problem_of(error)
    assert problem.message == (
        "ask /v1/embeddings or /v1/rerank; or raise the server's max_step_tokens; chat_template_kwargs has 'a'"
    )
    report("req-1", {}, error, problem, Flood(), 0.0)
    assert not caplog.records


def test_folders_that_are_known_are_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However they are written."""
    monkeypatch.chdir(tmp_path)
    given = ["models/small", "./a b/[c]", "plain"]
    for one in given:
        Path(one).mkdir(parents=True)
    folders = known_folders([*given, "openai/whisper-base"])
    text = f"models/small/x.bin, ./a b/[c]/x: {tmp_path}/a b/[c]/x; plain, openai/whisper-base, models/smaller"
    told = f"{HIDDEN}, {HIDDEN}: {HIDDEN}; plain, openai/whisper-base, models/smaller"
    assert without_paths(text, folders) == told


def kinds(root: type[TrioletError]) -> Iterator[type[TrioletError]]:
    yield root
    for kind in root.__subclasses__():
        yield from kinds(kind)


def made(kind: type[TrioletError], text: str) -> TrioletError:
    return kind("books", text) if kind is errors.InvariantViolation else kind(text)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "kind", sorted({one for one in kinds(TrioletError) if one.__module__ == errors.__name__}, key=str)
)
def test_no_error_of_an_engine_tells_a_client_a_path(
    kind: type[TrioletError], caplog: pytest.LogCaptureFixture
) -> None:
    """Alone, in a group, and whatever the error is; the log has all of it, in one line."""
    if kind is UnknownModel:
        return  # it names what the client asked for, see below
    for error in (made(kind, "no /srv/models/a\nhere"), ExceptionGroup("", [made(kind, "no /srv/models/a\nhere")])):
        problem = problem_of(error)
        assert "/srv" not in json.dumps(problem.as_object())
        assert HIDDEN in problem.message
        caplog.clear()
        with caplog.at_level(logging.INFO, LOGGER):
            report("req-1", {}, error, problem, Flood(), 0.0)
        (record,) = caplog.records
        assert "no /srv/models/a here" in record.getMessage()
        assert record.exc_info is None


def test_what_a_client_sent_it_is_told() -> None:
    assert problem_of(BadBody("model: '/v1/x' is none")).message == "model: '/v1/x' is none"
    assert problem_of(UnknownModel("no model '/v1/x'")).message == "no model '/v1/x'"
    assert "/srv" not in problem_of(OSError(5, "Input/output error", "/srv/a")).message


def test_refusals_are_cut_and_told_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """The words of a client may be in them, and a client may ask a thousand times."""
    error = InvalidRequest("no /srv/models/a, " + "/a" * 1_000_000)
    flood = Flood()
    for now in (0.0, 1.0, 59.0, 60.0):
        problem = problem_of(error)
        assert problem.message.startswith(f"no {HIDDEN}, ")
        assert len(problem.message) < 2_100
        report("req-1", {}, error, problem, flood, now)
    told = [record.getMessage() for record in caplog.records]
    assert [len(line) < 2_200 for line in told] == [True, True]
    assert [line.startswith("req-1 was refused: InvalidRequest: no /srv/models/a, ") for line in told] == [True, True]
    assert told[1].endswith(" (3 such requests since the last line)")


def test_a_refusal_is_no_traceback_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    refusal = Refusal(
        Problem(503, "the model 'a' cannot be loaded; the server's log has the reason", "model_not_loaded")
    )
    for error in (refusal, ExceptionGroup("", [refusal])):
        report("req-1", {}, error, problem_of(error), Flood(), 0.0)
    assert [record.exc_info for record in caplog.records] == [None, None]


# -- models that cannot be loaded ------------------------------------------------------------------------------------


class Mistyped(Engine):
    """One that the hub does not have, and says so in many lines."""

    async def __aenter__(self) -> Any:
        await trio.lowlevel.checkpoint()
        raise CheckpointError("there is no folder '/srv/a', and the hub says:\n" + "404\n" * 125)


TOO_LARGE = "the model 'a' needs more memory than all models may take; the server's log has the figures"
NOT_LOADED = "the model 'a' cannot be loaded; the server's log has the reason"


@pytest.mark.parametrize(
    ("budget", "size", "status", "code", "message"),
    [(8, 9, 507, "model_too_large", TOO_LARGE), (None, 0, 503, "model_not_loaded", NOT_LOADED)],
)
async def test_a_model_that_cannot_be_loaded_is_told_by_its_name_alone(
    caplog: pytest.LogCaptureFixture, budget: int | None, size: int, status: int, code: str, message: str
) -> None:
    """One that can never be loaded is not to be asked for again. The log has the reason, in one line."""
    body = json.dumps({"model": "a", "messages": [{"role": "user", "content": "a"}]}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with caplog.at_level(logging.INFO), trio.fail_after(PATIENCE):
        async with Engines({"a": ModelSpec.from_parts(lambda: Mistyped("a"), size)}, memory_budget=budget) as engines:
            async with serving_on(Server(ServerSettings(port=0, access_log=False), engines)) as place:
                async with await place.connect() as stream:
                    found = await answer(stream, head + b"content-length: %d\r\n\r\n" % len(body) + body)
    assert found.startswith(b"HTTP/1.1 %d " % status)
    assert b"/srv" not in found
    assert (b"retry-after: " in found) == (status == 503)
    answered = json.loads(found.partition(b"\r\n\r\n")[2])["error"]
    assert (answered["code"], answered["param"], answered["message"]) == (code, "model", message)
    told = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert not any(record.exc_info or "\n" in record.getMessage() for record in told)
    if status == 503:
        assert [record.name for record in told] == ["triolet.engines", "triolet.server"]
        assert "there is no folder '/srv/a', and the hub says: 404 404" in told[0].getMessage()


# -- a whole server --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def running(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    broken = tmp_path_factory.mktemp("broken")
    (broken / "config.json").write_text('{"model_type": "llama"}')
    with served({**{name: models[name] for name in ("llama", "whisper", "bert")}, "broken": str(broken)}) as one:
        yield one


CHAT, SAY = "/v1/chat/completions", [{"role": "user", "content": "a"}]
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "string", "pattern": "(a{99}){99}"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
ASKED: tuple[tuple[str, Any], ...] = (
    ("/metrics", None),
    ("/v1/models/broken", None),
    ("/openapi.json", None),
    ("/events", None),
    (CHAT, {"model": "broken", "messages": SAY, "stream": True}),
    (CHAT, {"model": "llama", "messages": SAY, "tools": [TOOL]}),
    (CHAT, {"model": "llama", "messages": SAY, "tools": [TOOL], "tool_choice": "required"}),
    (CHAT, {"model": "bert", "messages": SAY}),
    (CHAT, {"model": "whisper", "messages": SAY}),
    (CHAT, {"model": "llama", "messages": SAY, "chat_template_kwargs": {"nothing": 1}}),
    (CHAT, {"model": "llama", "messages": SAY, "max_tokens": 10_000_000}),
    (CHAT, {"model": "llama", "messages": [{"role": "tool", "content": "a"}]}),
    (CHAT, {"model": "llama", "messages": SAY, "response_format": FORM}),
    ("/v1/completions", {"model": "llama", "prompt": "a" * 100_000}),
    ("/v1/embeddings", {"model": "llama", "input": "a"}),
    ("/v1/rerank", {"model": "bert", "query": "a", "documents": ["b"]}),
    ("/v1/classify", {"model": "llama", "input": "a"}),
)


@pytest.mark.parametrize(("path", "body"), ASKED, ids=lambda value: json.dumps(value)[:60])
def test_no_answer_names_a_folder_of_the_server(running: Served, path: str, body: Any, models: dict[str, str]) -> None:
    _, told = running.get(path, body)
    own = (Path.cwd(), Path.home(), sys.prefix, tempfile.gettempdir(), "site-packages")
    folders = {*map(str, (*models.values(), *own))}
    assert told
    assert [folder for folder in folders if folder != "/" and folder in told] == []
    assert HIDDEN not in told, "what is told here has no path, and what only looks like one stays"


# -- a disk that is full ---------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a file that is always full")
def test_an_upload_that_has_no_room_is_answered_507(
    running: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In the middle of the upload, which is read on."""
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda *_, **__: open("/dev/full", "w+b", buffering=0))  # noqa: SIM115
    parts = '--edge\r\ncontent-disposition: form-data; name="model"\r\n\r\nwhisper\r\n--edge\r\n'
    head = 'content-disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
    body = (parts + head).encode() + b"x" * (6 * 2**20) + b"\r\n--edge--\r\n"
    status, told = running.get("/v1/audio/transcriptions", body, "multipart/form-data; boundary=edge")
    assert status == 507
    assert json.loads(told)["error"] == {
        "message": "the server's disk is full, so the request cannot be stored; ask again later, or send a smaller "
        "file",
        "type": "server_error",
        "param": None,
        "code": "insufficient_storage",
    }
    (record,) = [one for one in caplog.records if one.name == LOGGER]
    assert record.exc_info is None
    assert "failed: the disk for uploads is full: [Errno 28] No space left on device" in record.getMessage()
    running.until(lambda: not running.server.exchanges)


def test_quotas_and_groups_are_full_disks_too() -> None:
    assert problem_of(ExceptionGroup("", [OSError(122, "Disk quota exceeded")])).status == 507
    assert problem_of(OSError(5, "Input/output error")).status == 500
    assert problem_of(InvalidRequest("a")).status == 400
