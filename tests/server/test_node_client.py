"""OpenAI's own client for Node.js, as it is published, over the server: `make clients` installs it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from triolet import Transcript

from .served import PATIENCE, Served

FOLDER = Path(__file__).with_name("node")
NODE = shutil.which("node")
QUESTION = [{"role": "user", "content": "hi"}]
GREEDY = {"temperature": 0.0, "max_tokens": 8}

pytestmark = [
    pytest.mark.node,
    pytest.mark.real_time,
    pytest.mark.skipif(NODE is None or not (FOLDER / "node_modules").is_dir(), reason="make clients installs it"),
]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("images") / "noise.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (32, 48, 3), dtype=np.uint8)).save(path)
    return path


@pytest.fixture(scope="module")
def found(service: Served, speech: Path, image: Path) -> dict[str, dict[str, Any]]:
    """What came of each call of calls.mjs."""
    command = [NODE, str(FOLDER / "calls.mjs"), service.url, str(speech), str(image)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.fixture(scope="module")
def answers(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {name: one["answer"] for name, one in found.items() if "answer" in one}


@pytest.fixture(scope="module")
def transcript(service: Served, speech: Path) -> Transcript:
    return service.engine("whisper", lambda engine: engine.transcribe(speech))


def completed(service: Served, model: str = "llama", **query: Any) -> Any:
    return service.engine(model, lambda engine: engine.generate(**query))


def texts(answer: dict[str, Any]) -> list[str]:
    return [choice["message"]["content"] for choice in answer["choices"]]


def test_each_call_that_can_work_works(found):
    failed = {name for name, one in found.items() if "error" in one}
    assert failed == {"no_model", "no_such_member", "no_text", "no_audio", "no_tokens", "impatient"}


def test_conversations_get_the_text_of_the_engine(service, answers):
    expected = completed(service, messages=QUESTION, **GREEDY).text
    assert texts(answers["chat"]) == [expected]
    assert answers["chat_helper"] == expected
    several = completed(service, messages=QUESTION, n=2, seed=7, temperature=1.0, max_tokens=8)
    assert texts(answers["chat_n"]) == [several.text, several.alternatives[0].text]


def test_structured_answers_are_parsed(answers):
    assert answers["json_object"] == "object"
    assert answers["parse"]["colour"] in ("red", "green")


def test_a_tool_is_called_and_its_result_goes_back(answers):
    assert answers["tool"]["name"] == "paint"
    assert answers["tool"]["parsed_arguments"]["colour"] in ("red", "green")


def test_a_transcription_is_streamed(answers, transcript):
    *deltas, done = answers["transcription_stream"]
    assert "".join(one["delta"] for one in deltas) == done["text"] == transcript.text


def test_a_request_keeps_its_name(answers):
    assert answers["request_id"] == ["mine", "mine", "mine"]


@pytest.mark.parametrize(
    ("call", "kind", "status", "code", "param", "message"),
    [
        ("no_model", "NotFoundError", 404, "model_not_found", "model", "nobody"),
        ("no_such_member", "BadRequestError", 400, "invalid_request", "temprature", "did you mean temperature?"),
        ("no_text", "BadRequestError", 400, "invalid_request", None, "gives vectors, not text"),
        ("no_audio", "APIError", 415, "unsupported_audio", None, "not audio that can be decoded"),
        ("no_tokens", "BadRequestError", 400, "invalid_request", "input", "token ids"),
    ],
)
def test_errors_have_their_class_and_the_engines_words(found, call, kind, status, code, param, message):
    error = found[call]["error"]
    assert (error["class"], error["status"], error["code"], error["param"]) == (kind, status, code, param)
    assert message in error["message"]
    assert error["requestID"].startswith("req-")


def test_clients_that_go_leave_nothing_behind(service, found):
    assert found["impatient"]["error"]["class"] == "APIConnectionTimeoutError"
    assert found["left"]["answer"] == "chat.completion.chunk"
    service.until(service.is_idle)
