"""``/openapi.json`` says what is so."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from triolet.server.endpoints.table import ENDPOINTS
from triolet.server.openapi import openapi
from triolet.server.view.docs import docs_page

from .served import Served
from .talking import PaperEngine, paper_server
from .test_gate import Asked


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return openapi(ENDPOINTS, "1.2.3", ("one", "two"), keys=True)


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from (one for name, one in value.items() if name == "$ref")
        for one in value.values():
            yield from references(one)
    elif isinstance(value, list):
        for one in value:
            yield from references(one)


def test_every_endpoint_is_described(document: dict[str, Any]) -> None:
    described = {(path, method) for path, methods in document["paths"].items() for method in methods}
    assert described == {(one.path.replace(":path", ""), one.method.lower()) for one in ENDPOINTS}
    for methods in document["paths"].values():
        for operation in methods.values():
            assert operation["summary"].endswith(".")
            assert {"200", "400", "401", "429", "503"} <= operation["responses"].keys()


def test_every_reference_leads_to_a_schema(document: dict[str, Any]) -> None:
    found = set(references(document))
    assert found
    for reference in found:
        assert reference.removeprefix("#/components/schemas/") in document["components"]["schemas"], reference


def test_requests_name_a_model_that_is_served(document: dict[str, Any]) -> None:
    chat = document["components"]["schemas"]["ChatRequest"]["properties"]
    form = document["paths"]["/v1/audio/transcriptions"]["post"]["requestBody"]["content"]["multipart/form-data"]
    assert chat["model"]["enum"] == form["schema"]["properties"]["model"]["enum"] == ["one", "two"]


def test_a_form_has_a_file_and_lists_by_their_names(document: dict[str, Any]) -> None:
    form = document["paths"]["/v1/audio/transcriptions"]["post"]["requestBody"]["content"]["multipart/form-data"]
    assert form["schema"]["required"] == ["file", "model"]
    assert {"timestamp_granularities[]", "include[]", "temperature"} <= form["schema"]["properties"].keys()
    assert "null" not in json.dumps(form), "a member of a form is left out, never null"


def test_a_key_is_asked_for_where_there_is_one(document: dict[str, Any]) -> None:
    assert document["security"] == [{"key": []}]
    assert "security" not in openapi(ENDPOINTS, "1", ("one",), keys=False)


@pytest.mark.real_time
def test_the_server_tells_its_models(service: Served) -> None:
    told = json.loads(service.get("/openapi.json")[1])
    assert set(told["components"]["schemas"]["ChatRequest"]["properties"]["model"]["enum"]) >= {"whisper", "llama"}


async def test_a_page_shows_all_of_it_to_everybody_and_loads_nothing() -> None:
    """No model is named, so no key is asked for. Each link leads to its schema; a description is text."""
    asked = await Asked(paper_server(PaperEngine(), api_keys=("secret",)), "GET", "/docs").run()
    text = b"".join(one.get("body", b"") for one in asked.got).decode()
    assert asked.status == 200
    assert "script-src 'none'" in asked.answer["content-security-policy"]
    assert all(f"{one.method} {one.path.replace(':path', '')}</b>" in text for one in ENDPOINTS)
    assert not re.findall(r"<(?:script|img|link|iframe)|(?:src|href)=.https?:|whisper", text)
    links, places = set(re.findall(r'href="#(\w+)"', text)), re.findall(r'id="(\w+)"', text)
    assert len(places) == len(set(places))
    assert "ChatMessage" in links <= set(places)
    schema = {"properties": {"a<b": {"type": "string", "description": "<i>", "default": "&"}}, "required": ["a<b"]}
    document = {"info": {"title": "T", "version": "1"}, "paths": {}, "components": {"schemas": {"S": schema}}}
    assert "<tr><td>a&lt;b *<td>string<td>&lt;i&gt; &quot;default&quot;: &quot;&amp;&quot;" in docs_page(document).html
