"""The pages on the server are true: their code runs against a server and prints what they say, and their tables are
whole."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import logging
import re
import shutil
import subprocess
import typing
from collections.abc import Iterator
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import soundfile
import soxr
import websockets.sync.client
from attrs import asdict
from openai.types import completion_create_params, embedding_create_params
from openai.types.audio import transcription_create_params, translation_create_params
from openai.types.chat import completion_create_params as chat_create_params
from PIL import Image
from pydantic import BaseModel

from triolet import demo
from triolet.core import errors
from triolet.server import command
from triolet.server.endpoints.table import ENDPOINTS
from triolet.server.openapi import openapi
from triolet.server.schemas import chat, completions, realtime, speech, vectors
from triolet.server.settings import ServerSettings

from ..checkpoints.families import make_checkpoint
from .openai_client import PATIENT_SOCKET
from .served import PATIENCE, Served, served

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "docs" / "serving.md", ROOT / "docs" / "operate.md")
ADDRESS = "//127.0.0.1:8000"
MODELS = {  # tiny ones by the names of the page; "speech" is the demo checkpoint
    "chat": "qwen3",
    "vision": "qwen2_vl",
    "vectors": "bert",
    "reranker": "bert_reranker",
    "classifier": "bert_classifier",
}
REQUESTS: dict[str, type[BaseModel]] = {
    "transcriptions": speech.TranscriptionForm,
    "translations": speech.TranslationForm,
    "conversations": chat.ChatRequest,
    "prompts": completions.CompletionRequest,
    "embeddings": vectors.EmbeddingRequest,
    "rerank": vectors.RerankRequest,
    "classify": vectors.ClassifyRequest,
}
OF_OPENAI: dict[str, Any] = {
    "transcriptions": transcription_create_params.TranscriptionCreateParamsBase,
    "translations": translation_create_params.TranslationCreateParams,
    "conversations": chat_create_params.CompletionCreateParamsBase,
    "prompts": completion_create_params.CompletionCreateParamsBase,
    "embeddings": embedding_create_params.EmbeddingCreateParams,
}
FENCED = r"^```(\w+)\n(.*?)^```$(?:\n\n```(text|json)\n(.*?)^```$)?"


def text() -> str:
    return "".join(page.read_text(encoding="utf-8") for page in PAGES)


def snippets() -> list[tuple[str, str, str, str]]:
    """Language, code, and what it prints with its own language."""
    found = re.findall(FENCED, text(), re.MULTILINE | re.DOTALL)
    return [one for one in found if one[0] in ("sh", "python")]


def section(title: str) -> str:
    return re.split(r"^##", text().partition(f"\n{title}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


def rows(part: str) -> list[list[str]]:
    """The cells of the tables in ``part``, without their heads."""
    tables = re.findall(r"^\|-.*\n((?:\|.*\n?)+)", part, re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split("|")] for table in tables for line in table.splitlines()]


def names(cell: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", cell))


# -- its code ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("checkpoints")
    made = {name: str(make_checkpoint(family, folder / family)) for name, family in MODELS.items()}
    with served({"speech": demo.checkpoint(), **made}) as running:
        yield running


@pytest.fixture(scope="module")
def locked_server() -> Iterator[Served]:
    with served({"demo": demo.checkpoint()}, api_keys=("secret",)) as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the files that the page names."""
    monkeypatch.chdir(tmp_path)
    samples = {sample.path.stem: sample.path for sample in demo.samples()}
    shutil.copy(samples["en-command"], "talk.wav")  # the format is found in the file, not in its name
    shutil.copy(samples["en-command"], "ada.wav")
    shutil.copy(samples["de-command"], "gruss.wav")
    audio, rate = soundfile.read(samples["en-command"], dtype="int16")
    Path("talk.pcm").write_bytes(soxr.resample(audio, rate, 16_000).astype("<i2").tobytes())
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)).save("cat.png")
    return tmp_path


@pytest.mark.real_time
@pytest.mark.filterwarnings("ignore:connect:DeprecationWarning")  # of websockets, as OpenAI's client uses it
def test_every_piece_of_code_prints_what_the_page_says(
    folder: Path, page_server: Served, locked_server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In order, since later ones use what earlier ones import. WebSockets wait for long."""
    connect = partial(websockets.sync.client.connect, **PATIENT_SOCKET)
    monkeypatch.setattr(websockets.sync.client, "connect", connect)
    known: dict[str, Any] = {}
    wrong = []
    assert len(snippets()) == 34
    for language, code, kind, expected in snippets():
        url = locked_server.url if code.startswith("# keys:") else page_server.url
        here = code.replace(ADDRESS, url.removeprefix("http:"))
        printed = _run_shell(here) if language == "sh" else _run_python(here, known)
        wrong += [] if agrees(printed, kind, expected) else [f"{code}\n{printed}"]
    known["client"].close()
    assert not wrong, "\n\n".join(wrong)


def _run_shell(code: str) -> str:
    command = ["bash", "-euo", "pipefail", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, f"{code}\n{done.stderr}"
    return done.stdout.replace("\r", "")


def _run_python(code: str, known: dict[str, Any]) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "a page", "exec"), known)
    return printed.getvalue()


def agrees(printed: str, kind: str, expected: str) -> bool:
    """Whether it is what the page shows, where ``...`` stands for anything."""
    if kind == "json":
        return fits(json.loads(printed), json.loads(expected))
    return _like(printed.rstrip("\n"), expected.rstrip("\n"))


def fits(told: object, shown: object) -> bool:
    """Whether the JSON ``told`` has the members of ``shown`` and no other ones."""
    if shown == "...":
        return True
    if isinstance(shown, str) and isinstance(told, str):
        return _like(told, shown)
    if isinstance(shown, dict) and isinstance(told, dict):
        return shown.keys() == told.keys() and all(fits(told[key], shown[key]) for key in shown)
    if isinstance(shown, list) and isinstance(told, list):
        return len(shown) == len(told) and all(map(fits, told, shown))
    return told == shown


def _like(told: str, shown: str) -> bool:
    return re.fullmatch(re.escape(shown).replace(r"\.\.\.", ".*"), told, re.DOTALL) is not None


def access_line(running: Served, caplog: pytest.LogCaptureFixture, ask: str) -> dict[str, Any]:
    """What the access log tells of ``ask``, a command of curl; a line may come after the answer."""
    found: list[dict[str, Any]] = []

    def told() -> bool:
        lines = [json.loads(one.getMessage()) for one in caplog.records if one.name == "triolet.access"]
        found[:] = [line for line in lines if line["id"] == "mine"]
        return bool(found)

    with caplog.at_level(logging.INFO, "triolet.access"), running.when(told):
        _run_shell(f"{ask} -H 'x-request-id: mine'")
    (line,) = found
    return line


@pytest.mark.real_time
def test_the_line_of_the_access_log_has_the_members_that_the_page_shows(
    folder: Path, page_server: Served, caplog: pytest.LogCaptureFixture
) -> None:
    shown = json.loads(re.findall(r"```json\n(\{\"time\".*?)```", text(), re.DOTALL)[0])
    ask = f"curl -sS {page_server.url}/v1/audio/transcriptions -F model=speech -F file=@talk.wav"
    assert list(access_line(page_server, caplog, ask)) == list(shown)


@pytest.mark.real_time
def test_a_key_is_named_by_its_hash_as_the_page_says(locked_server: Served, caplog: pytest.LogCaptureFixture) -> None:
    (who,) = re.findall(r"`(key-\w+)`", text())
    ask = f"curl -sS {locked_server.url}/v1/models -H 'authorization: Bearer secret'"
    assert access_line(locked_server, caplog, ask)["who"] == who


# -- its tables --------------------------------------------------------------------------------------------------------


def test_every_endpoint_is_in_the_table_and_nothing_else() -> None:
    told = {name for row in rows(section("## Endpoints")) for name in names(row[0])}
    routed = {f"{one.method} {one.path.replace(':path', '')}" for one in ENDPOINTS}
    assert told == routed | {"GET /v1/realtime", "GET /openapi.json", "GET /docs"}


def members_told() -> dict[str, list[str]]:
    table = section("## Members of requests").partition("These members of OpenAI's own requests")[0]
    return {row[0]: row[1:] for row in rows(table)}


@pytest.mark.parametrize("kind", REQUESTS)
def test_every_member_is_taken_or_not_used_as_its_schema_says(kind: str) -> None:
    taken, unused = members_told()[kind]
    fields = REQUESTS[kind].model_fields
    ignored = {name for name, field in fields.items() if (field.description or "").startswith("Accepted")}
    assert names(unused) == ignored
    assert names(taken) == fields.keys() - ignored | (
        {"file"} if issubclass(REQUESTS[kind], speech.SpeechForm) else set()
    )


@pytest.mark.parametrize("kind", OF_OPENAI)
def test_every_member_of_openais_request_is_taken_not_used_or_refused(kind: str) -> None:
    table = section("## Members of requests").partition("These members of OpenAI's own requests")[2]
    refused = {row[0]: names(row[1]) for row in rows(table)}.get(kind, set())
    known = set().union(*map(names, members_told()[kind]))
    theirs = set(OF_OPENAI[kind].__annotations__)
    nullable = {"best_of", "suffix"} if kind == "prompts" else set()
    assert refused == theirs - known | nullable


def test_every_extension_is_one() -> None:
    table = section("## Members of requests").partition("OpenAI's API does not have these members")[2]
    told = {name for row in rows(table) for name in names(row[0])} - {"triolet.provisional", "state", "max_model_len"}
    theirs = {name for kind in OF_OPENAI for name in OF_OPENAI[kind].__annotations__} | {"stream"}
    ours = {name for kind in OF_OPENAI for name in REQUESTS[kind].model_fields}
    assert told - ours == set()
    assert ours - theirs - told == set()


def test_every_event_of_live_audio_is_in_the_tables() -> None:
    told = [names(row[0]) for row in rows(section("## Live audio"))]
    union, _ = typing.get_args(realtime.ClientEvent)
    sent = {one.model_fields["type"].annotation.__args__[0] for one in typing.get_args(union)}
    files = [*(ROOT / "server/endpoints").glob("live_*.py"), ROOT / "server/endpoints/realtime.py"]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    strings = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    answered = {
        one
        for one in strings
        if re.fullmatch(r"error|triolet\.provisional|[a-z_]+(\.[a-z_]+)*\.[a-z_]+ed|.*\.delta", one)
    }
    assert len(answered) == 12
    assert set().union(*told) == sent | answered


@pytest.mark.real_time
def test_every_metric_is_in_the_table_with_its_labels(page_server: Served) -> None:
    table = {name: names(row[1]) for row in rows(section("## Metrics")) for name in names(row[0])}
    registry = page_server.server.metrics._registry
    families = page_server.ask(lambda: list(registry.collect()))
    assert {family.name for family in families} == set(table)
    for family in families:
        for sample in family.samples:
            assert sample.labels.keys() - {"le"} == table[family.name]


def test_every_option_of_the_command_is_in_the_table_of_settings() -> None:
    told = set().union(*(names(row[0]) for row in rows(section("## Settings"))))
    told = {one.partition(" ")[0] for one in told}
    params = command.serve.get_params(click.Context(command.serve))
    options = {option for one in params for option in one.opts if option.startswith("--")}
    assert told | {"--help"} == options | {"MODEL"}


def test_every_status_is_in_the_table_of_errors_with_codes_that_exist() -> None:
    table: dict[int, set[str]] = {}
    for row in rows(section("## Errors")):
        table.setdefault(int(row[0]), set()).update(names(row[1]))
    document = openapi(ENDPOINTS, "1", (), keys=False)
    answers = {
        int(one) for path in document["paths"].values() for method in path.values() for one in method["responses"]
    }
    kinds = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, errors.TrioletError)]
    told = {one.http_status for one in kinds}
    assert answers - {200} | told | {405} == table.keys()
    words = {re.sub(r"(?<!^)(?=[A-Z])", "_", one.__name__).lower(): one.http_status for one in kinds}
    for status, codes in table.items():
        for code in codes - {"param"}:
            known = words.get(code, status)
            assert known == status
            assert code in words or code == HTTPStatus(status).name.lower() or code in _sources()


def _sources() -> str:
    return "".join(path.read_text(encoding="utf-8") for path in (ROOT / "server").rglob("*.py"))


def test_every_limit_that_the_page_names_is_a_setting_with_its_default() -> None:
    table = {setting: row[2] for row in rows(section("## Limits")) for setting in names(row[1])}
    by_option = {one.opts[0]: one.name for one in command.serve.params}
    words = {
        "max_body_bytes": "512 MiB",
        "max_audio_seconds": "six hours",
        "request_memory": "a quarter of the free memory, up to 2 GiB",
        "requests_per_minute": "no limit",
    }
    for told, default in table.items():
        name = by_option.get(told) or told.removeprefix("ServerSettings.")
        assert default == (words.get(name) or f"{getattr(ServerSettings(), name):,}".removesuffix(".0")), told
    unchanged = {"max_body_bytes": 512 * 2**20, "max_audio_seconds": 6 * 3_600.0, "request_memory": None}
    assert unchanged.items() <= asdict(ServerSettings()).items()
    assert len(table) == 14
