"""``triolet serve`` before it serves: what cannot work is said at once, without a traceback, and no model is loaded."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import socket
import warnings
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from triolet import Engine, EngineConfig, Engines, ModelSpec, demo
from triolet.api.command_line.terminal import FAILED
from triolet.server import command
from triolet.server.command import KEY_VARIABLE, _keys, _run, by_model, models_of, serve
from triolet.server.listening import CannotListen, Listener
from triolet.server.log_format import ACCESS, FORMATS, log_to
from triolet.server.server import Server
from triolet.server.settings import ServerSettings


@pytest.fixture(autouse=True)
def loggers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The log of this process, and what libraries are told in its environment, is as it was."""
    for library in ("TRANSFORMERS_VERBOSITY", "HF_HUB_VERBOSITY"):
        monkeypatch.setenv(library, "")  # so that it is as it was
        monkeypatch.delenv(library)
    found = [logging.getLogger(name) for name in ("", "triolet", "python_multipart")]
    before = [(one.handlers[:], one.level) for one in found]
    yield
    logging.captureWarnings(False)
    for one, (one.handlers[:], level) in zip(found, before, strict=True):
        one.setLevel(level)


@pytest.mark.parametrize("kind", FORMATS)
def test_all_lines_of_the_log_have_one_form(kind: str) -> None:
    """The access log, a traceback, a warning of Python's, and a path with a line end, which begins no line."""
    stream = io.StringIO()
    log_to(stream, kind)
    members = {
        "time": "T",
        "client": "::1",
        "method": "GET",
        "path": "/a\nb\x1b\x7f 200",
        "seconds": 0.5,
        "id": "r",
        "status": 200,
    }
    logging.getLogger(ACCESS).info("%s", json.dumps(members))
    logging.getLogger("triolet.engines").warning("a: %s", "not loaded")
    logging.getLogger("some.library").warning("of a library")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    try:
        raise ValueError("here")
    except ValueError:
        logging.getLogger("triolet.server").exception("r failed")
    lines = stream.getvalue().splitlines()
    if kind == "json":
        access, engines, library, python, failed = map(json.loads, lines)
        assert access == {**members, "level": "info", "logger": ACCESS}
        assert (engines["level"], engines["logger"], engines["message"]) == (
            "warning",
            "triolet.engines",
            "a: not loaded",
        )
        assert (library["logger"], library["message"]) == ("some.library", "of a library")
        assert "DeprecationWarning: old" in python["message"]
        assert (failed["message"], failed["traceback"].splitlines()[-1]) == ("r failed", "ValueError: here")
        return
    assert (
        lines[0].partition(" INFO ")[2] == r'triolet.access: GET "/a\nb\u001b\u007f 200" 200 0.5 s client="::1" id="r"'
    )
    assert lines[1].endswith(" WARNING triolet.engines: a: not loaded")
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ [\w.]+: ", line) for line in lines[:4])


@pytest.mark.real_time
def test_a_start_that_fails_is_told_in_the_form_of_the_log(taken: int) -> None:
    result = CliRunner().invoke(serve, ["demo", "--port", str(taken), "--log-format", "json"])
    [line] = map(json.loads, result.output.splitlines())
    assert (line["level"], line["logger"]) == ("error", "triolet.server")
    assert f"cannot listen on 127.0.0.1:{taken} (" in line["message"]
    result = CliRunner().invoke(serve, ["/nonexist", "--log-format", "json"])
    assert (result.exit_code, "/nonexist" in json.loads(result.output)["message"]) == (FAILED, True)
    assert os.environ["HF_HUB_VERBOSITY"] == "error", "before the hub's library is imported"


@pytest.fixture
def taken() -> Iterator[int]:
    """A port where somebody listens."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        yield listening.getsockname()[1]


@pytest.mark.real_time
def test_a_port_that_is_taken_is_named(taken: int, capsys: pytest.CaptureFixture[str]) -> None:
    server = Server(ServerSettings(port=taken), Engines({"never": "loaded"}))
    assert _run(server, preload=True) == FAILED
    told = capsys.readouterr().err
    assert f"cannot listen on 127.0.0.1:{taken} (Address already in use); choose another port or host" in told
    assert "Traceback" not in told


@pytest.mark.real_time
def test_who_listens_first_has_the_port() -> None:
    """Both have bound it, and neither listened yet."""
    with Listener(ServerSettings(port=0)) as first:
        port = first._socket.getsockname()[1]
        with Listener(ServerSettings(port=port)) as second:
            assert first.listen() == f"http://127.0.0.1:{port}"
            with pytest.raises(CannotListen, match="Address already in use"):
                second.listen()


def test_a_certificate_that_is_none_is_named(tmp_path: Path) -> None:
    wrong = tmp_path / "cert.pem"
    wrong.write_text("nothing")
    with pytest.raises(CannotListen, match=rf"the certificate {wrong} and the key {wrong} cannot be used \("):
        Listener(ServerSettings(port=0, certfile=str(wrong), keyfile=str(wrong)))


TWO = ["--model", "a=demo", "--model", "b=demo"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["demo", "--idle-seconds", "-1"], "--idle-seconds=-1"),
        (["demo", "--memory-budget", "0"], "--memory-budget=0"),
        (["demo", "--drain-seconds", "-1"], "--drain-seconds=-1"),
        (["demo", "--host", "0.0.0.0"], "no API key is set"),
        ([], "no model is given; give one"),
        (["--model", "speech="], "--model 'speech='; allowed: MODEL, or NAME=MODEL"),
        (["demo", "--memory-budget", "much"], "is not a size"),
        (["demo", "--certfile", __file__], "one of certfile and keyfile is missing"),
        (["demo", "--max-model-len", "4k"], "--max-model-len='4k'; allowed: an integer, 0 to"),
        (["demo", "--max-model-len", "9", "--max-model-len", "demo=9"], "--max-model-len is given twice for 'demo'"),
        ([*TWO, "--max-model-len", "9"], "--max-model-len '9' with 2 models; allowed: NAME=VALUE, where NAME is one"),
        ([*TWO, "--draft-head", "x"], "--draft-head 'x' with 2 models; allowed: NAME=VALUE, where NAME is one"),
        ([*TWO, "--chat-template", "c=x.jinja"], "--chat-template 'c=x.jinja' with 2 models; allowed: NAME=VALUE"),
    ],
)
def test_a_value_that_cannot_work_is_a_wrong_use(words: list[str], message: str) -> None:
    result = CliRunner().invoke(serve, words)
    assert result.exit_code == 2
    assert message in result.output


def test_a_cluster_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """All else works."""
    monkeypatch.setattr(command, "entry_points", lambda **_: ())
    monkeypatch.delitem(vars(serve), "replicas", raising=False)
    result = CliRunner().invoke(serve, ["demo", "--cluster", "--replicas", "2"])
    assert result.exit_code == 2
    assert "--cluster needs the package triolet-ray: pip install triolet-ray" in " ".join(result.output.split())
    assert CliRunner().invoke(serve, ["--help"]).exit_code == 0
    monkeypatch.delitem(vars(serve), "replicas")  # others find what is installed


def demo_server(*, aligner: Engine | None = None, memory_budget: int | None = None, **setting: Any) -> Server:
    specs = {"demo": ModelSpec(demo.checkpoint(), config=EngineConfig(**setting))}
    return Server(ServerSettings(port=0), Engines(specs, memory_budget=memory_budget), aligner=aligner)


NO_HEAD = "--draft-head is given for WhisperForConditionalGeneration, which no draft head fits; allowed: Gemma 4"
NO_TEMPLATE = "--chat-template is given for WhisperForConditionalGeneration, which has no conversations; allowed: deco"
TOO_LARGE = "allowed: --memory-budget=1048576, 1.0 MiB, for all models together"
SMALLER = "--max-model-len, by --kv-dtype='bfloat16', or by --quantization='int8'"


@pytest.mark.real_time  # the port is bound before the model is loaded
@pytest.mark.parametrize(
    ("given", "messages"),
    [
        ({"max_positions": 449}, ["triolet: --max-model-len=449; allowed: up to 448, the positions of WhisperFor"]),
        ({"chat_template": "{{ x }}"}, [f"triolet: {NO_TEMPLATE}"]),
        ({"draft_head": "x/y"}, [f"triolet: {NO_HEAD}"]),
        ({"memory_budget": 1 << 20}, ["triolet: the model 'demo' is estimated to need ", TOO_LARGE, SMALLER]),
        ({"aligner": 449}, ["--max-model-len=449; allowed: up to 448"]),
        ({"aligner": 0}, ["does not align texts; allowed: Qwen3-ForcedAligner and CTC models"]),
    ],
    ids=str,
)
def test_what_can_never_be_loaded_ends_the_start_in_the_words_of_the_command(
    given: dict[str, Any], messages: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that is too large, though it would be loaded by its first request alone."""
    if "aligner" in given:
        config = EngineConfig(max_positions=given["aligner"])
        given = {"aligner": Engine(demo.checkpoint(), config=config)}
    with serve.make_context("serve", ["demo"]):
        preload = given.keys() <= {"max_positions", "chat_template", "draft_head"}
        assert _run(demo_server(**given), preload=preload) == FAILED
    told = capsys.readouterr().err
    assert all(message in told for message in messages)
    assert "_kv" not in told.partition("allowed")[2]


def test_a_model_has_its_own_name_wherever_it_stands() -> None:
    assert models_of("a/b", ()) == models_of(None, ("a/b",)) == {"a/b": "a/b"}
    assert models_of("a/b", ("c/d", "e=f")) == {"a/b": "a/b", "c/d": "c/d", "e": "f"}


def test_a_file_and_a_model_of_ollama_have_short_names(tmp_path: Path) -> None:
    (tmp_path / "m.Q4_K_M.gguf").touch()
    file = str(tmp_path / "m.Q4_K_M.gguf")
    assert models_of("ollama:llama3.2:1b", (file,)) == {"llama3.2:1b": "ollama:llama3.2:1b", "m.Q4_K_M": file}


def test_a_setting_is_for_the_model_that_it_names(tmp_path: Path) -> None:
    equal = str(tmp_path / "x=y.jinja")
    assert by_model("--f", ("chat=9", "a=b=10"), {"chat": "", "a": ""}) == {"chat": "9", "a": "b=10"}
    assert by_model("--f", (equal,), {"chat": ""}) == {"chat": equal}
    assert by_model("--f", ("chat",), {"chat": ""}) == {"chat": "chat"}, "a file may have the model's name"


def test_a_missing_folder_ends_the_start_before_anybody_asks_for_its_model() -> None:
    result = CliRunner().invoke(serve, ["--model", "a=demo", "--model", "b=./absent/folder"])
    assert result.exit_code == FAILED
    assert "there is no folder absent/folder; allowed: a checkpoint's folder or a hub id" in result.output
    result = CliRunner().invoke(serve, ["demo", "--aligner", "./absent/folder"])
    assert "there is no folder absent/folder; allowed: a checkpoint's folder or a hub id" in result.output


UNSENDABLE = "has a blank or a character other than visible ASCII"


def test_a_key_that_no_client_can_send_is_refused_by_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / "keys"
    keys.write_bytes(b"# mine\n  good  \nschl\xfcssel\n")
    told = CliRunner().invoke(serve, ["demo", "--api-key-file", str(keys)])
    assert told.exit_code == 2
    assert f"the key in --api-key-file {keys} (line 3) {UNSENDABLE}" in _plain(told.output)
    told = CliRunner().invoke(serve, ["demo", "--api-key", "good", "--api-key", "schlüssel"])
    assert f"the key in --api-key (number 2) {UNSENDABLE}" in _plain(told.output)
    monkeypatch.setenv(KEY_VARIABLE, "good, my key")
    told = CliRunner().invoke(serve, ["demo"])
    assert f"the key in TRIOLET_API_KEY (number 2) {UNSENDABLE}" in _plain(told.output)
    assert "my key" not in told.output


def test_a_file_of_keys_may_begin_with_a_mark_of_its_encoding(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_bytes("\ufeffsecret\n#no\n\n two \n".encode())
    assert _keys((), str(keys)) == ["secret", "two"]


def _plain(output: str) -> str:
    """Without the terminal's line ends."""
    return " ".join(output.split())
