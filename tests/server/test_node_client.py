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
def found(service: Served, speech: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What came of each call of calls.mjs."""
    image = tmp_path_factory.mktemp("images") / "noise.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (32, 48, 3), dtype=np.uint8)).save(image)
    command = [NODE, str(FOLDER / "calls.mjs"), service.url, str(speech), str(image)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_each_call_that_can_work_gets_what_the_engine_gives(service, speech, found):
    failed = {name for name, one in found.items() if "error" in one}
    assert failed == {"no_model", "no_such_member", "no_text", "no_audio", "no_tokens", "impatient"}
    answers = {name: one["answer"] for name, one in found.items() if name not in failed}
    text = service.engine("llama", lambda engine: engine.generate(messages=QUESTION, **GREEDY)).text
    assert [choice["message"]["content"] for choice in answers["chat"]["choices"]] == [text]
    assert answers["chat_helper"] == text
    assert answers["json_object"] == "object"
    assert answers["parse"]["colour"] in ("red", "green")
    assert answers["tool"]["parsed_arguments"]["colour"] in ("red", "green")
    *deltas, done = answers["transcription_stream"]
    transcript = service.engine("whisper", lambda engine: engine.transcribe(speech))
    assert "".join(one["delta"] for one in deltas) == done["text"] == transcript.text
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
