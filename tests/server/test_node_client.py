"""OpenAI's own client for Node.js, as it is published, over the server: `make clients` installs it."""

from __future__ import annotations

import json
import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from triolet import Transcript
from triolet.api.formats.objects import as_verbose_object
from triolet.api.formats.writers import SRT, VTT, written

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


def test_models_are_listed_and_found(service, answers):
    assert answers["models"] == list(service.server.engines.models)
    assert answers["model"] == "bert"


def test_conversations_get_the_text_of_the_engine(service, answers):
    expected = completed(service, messages=QUESTION, **GREEDY).text
    assert texts(answers["chat"]) == [expected]
    assert answers["chat_helper"] == expected
    several = completed(service, messages=QUESTION, n=2, seed=7, temperature=1.0, max_tokens=8)
    assert texts(answers["chat_n"]) == [several.text, several.alternatives[0].text]


def test_logprobs_are_those_of_the_engine(service, answers):
    expected = completed(service, messages=QUESTION, logprobs=2, **GREEDY)
    told = answers["chat_logprobs"]["choices"][0]["logprobs"]["content"]
    assert [one["logprob"] for one in told] == pytest.approx(expected.logprobs)
    assert {len(one["top_logprobs"]) for one in told} == {2}


def test_a_stream_has_the_same_text_and_its_usage_at_the_end(answers):
    *parts, last = answers["chat_stream"]
    joined = "".join(part["choices"][0]["delta"].get("content", "") for part in parts)
    assert [joined] == texts(answers["chat"])
    assert last["usage"] == answers["chat"]["usage"]


def test_an_image_is_seen(service, answers, image):
    content = [{"type": "image", "image": image.read_bytes()}, {"type": "text", "text": "What is it?"}]
    expected = completed(service, "qwen2_vl", messages=[{"role": "user", "content": content}], **GREEDY)
    assert texts(answers["chat_image"]) == [expected.text]


def test_structured_answers_are_parsed(answers):
    assert answers["json_object"] == "object"
    assert answers["parse"]["colour"] in ("red", "green")


def test_a_tool_is_called_and_its_result_goes_back(answers):
    assert answers["tool"]["name"] == "paint"
    assert answers["tool"]["parsed_arguments"]["colour"] in ("red", "green")


def test_prompts_are_completed(service, answers):
    expected = [completed(service, prompt=prompt, **GREEDY).text for prompt in ("one", "two")]
    assert [choice["text"] for choice in answers["completion"]["choices"]] == expected
    assert "".join(part["choices"][0]["text"] for part in answers["completion_stream"]) == expected[0]


def test_vectors_are_those_of_the_engine(service, answers):
    expected = service.engine("bert", lambda engine: engine.embed(["one", "two"]))
    vectors = partial(map, lambda one: one["embedding"])
    assert np.allclose(list(vectors(answers["embedding_float"]["data"])), expected, atol=1e-6)
    assert np.allclose(list(vectors(answers["embedding"]["data"])), expected[:1], atol=1e-6)


def test_transcriptions_are_those_of_the_engine_in_every_format(service, answers, transcript, speech):
    assert answers["transcription"]["text"] == transcript.text
    assert answers["transcription_text"] == transcript.text + "\n"
    assert answers["transcription_srt"] == written(transcript, SRT)
    assert answers["transcription_vtt"] == written(transcript, VTT)
    words = service.engine("whisper", lambda engine: engine.transcribe(speech, language="en", timestamps="word"))
    told, expected = answers["transcription_verbose"], as_verbose_object(words)
    assert (told["words"], told["segments"]) == (expected["words"], expected["segments"])


def test_transcriptions_take_objects_and_lists_of_a_form(answers, transcript):
    told = answers["transcription_options"]
    assert told["text"] == transcript.text
    assert bytes(byte for one in told["logprobs"] for byte in one["bytes"]).decode().strip() == transcript.text


def test_a_transcription_is_streamed(answers, transcript):
    *deltas, done = answers["transcription_stream"]
    assert "".join(one["delta"] for one in deltas) == done["text"] == transcript.text


def test_translations_are_in_english(answers, transcript):
    assert answers["translation"]["text"] == answers["translation_verbose"]["text"] == transcript.text
    assert answers["translation_verbose"]["language"] == "english"


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
