"""``/openapi.json``: the endpoints as an OpenAPI 3.1 document, made of the very bodies that they check."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from .endpoints.table import EVENTS, JSON, Endpoint
from .schemas.base import ErrorAnswer

_REF = "#/components/schemas/{model}"
_PATH_PART = re.compile(r"\{(\w+):path\}")
_PROBLEMS = {
    "400": "The request cannot work as it is.",
    "401": "No API key, or a wrong one.",
    "403": "The origin, the host or an address in the request is not allowed.",
    "404": "There is no such model, or no such path.",
    "408": "The request did not arrive in time.",
    "409": "The engine is in no state to serve it.",
    "413": "The request, or what it asks for, is too large.",
    "415": "The body, the audio or the image is of another kind.",
    "422": "An address in the request could not be fetched, or the model has no adapter.",
    "429": "Too many requests; Retry-After says when to come again.",
    "500": "The engine or the server failed on the request.",
    "503": "The server or the engine is stopping, or sleeps.",
    "507": "The server has no room to store the request.",
}


def openapi(endpoints: Iterable[Endpoint], version: str, models: Iterable[str], *, keys: bool) -> dict[str, Any]:
    """The document. ``models``: the names that requests may have; ``keys``: requests need an API key."""
    chosen, allowed = tuple(endpoints), list(models)
    names, schemas = _schemas(chosen)
    paths: dict[str, dict[str, Any]] = {}
    for one in chosen:
        paths.setdefault(_PATH_PART.sub(r"{\1}", one.path), {})[one.method.lower()] = _operation(one, names)
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Triolet", "version": version, "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"}},
        "paths": paths,
        "components": {"schemas": schemas},
    }
    for body in _with_models(document):
        body["model"]["enum"] = allowed
    if keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _with_models(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the members of each request that names a model."""
    for name, schema in document["components"]["schemas"].items():
        if name.endswith("Request"):
            yield schema["properties"]
    for path in document["paths"].values():
        for operation in path.values():
            form = operation.get("requestBody", {}).get("content", {}).get("multipart/form-data")
            if form is not None:
                yield form["schema"]["properties"]


def _schemas(endpoints: Iterable[Endpoint]) -> tuple[dict[tuple[Any, str], str], dict[str, Any]]:
    """A reference for each body, of requests ("validation") and answers ("serialization"), and all schemas."""
    bodies: dict[tuple[type[BaseModel], Any], None] = {(ErrorAnswer, "serialization"): None}
    for one in endpoints:
        if one.body is not None:
            bodies[one.body, "validation"] = None
        for kinds in one.answers.values():
            bodies.update({(kind, "serialization"): None for kind in kinds})
    found, document = models_json_schema(list(bodies), ref_template=_REF)
    return {key: value["$ref"] for key, value in found.items()}, document["$defs"]


def _operation(one: Endpoint, names: Mapping[tuple[Any, str], str]) -> dict[str, Any]:
    told: dict[str, Any] = {
        "operationId": one.handle.__name__,
        "tags": [one.tag],
        "summary": " ".join((one.handle.__doc__ or "").split()),
        "responses": {"200": {"description": "The answer.", "content": _answers(one, names)}, **_problems(one, names)},
    }
    if one.body is not None and one.is_form:
        told["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": _form(one.body)}}}
    elif one.body is not None:
        content = {JSON: {"schema": {"$ref": names[one.body, "validation"]}}}
        told["requestBody"] = {"required": True, "content": content}
    parameters = _PATH_PART.findall(one.path)
    if parameters:
        told["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in parameters
        ]
    return told


def _form(body: type[BaseModel]) -> dict[str, Any]:
    """Describes the members of a form: lists are named ``name[]``, and the file comes first."""
    schema = body.model_json_schema(ref_template=_REF)
    members = {"file": {"type": "string", "contentMediaType": "application/octet-stream"}}
    for name, member in schema["properties"].items():
        members[f"{name}[]" if member.get("type") == "array" else name] = _of_form(member)
    return {
        "type": "object",
        "properties": members,
        "required": ["file", *schema.get("required", ())],
        "additionalProperties": False,
    }


def _of_form(member: dict[str, Any]) -> dict[str, Any]:
    """A member of a form is a text, and never null: it is left out."""
    choices = [one for one in member.get("anyOf", ()) if one != {"type": "null"}]
    rest = {name: value for name, value in member.items() if name != "anyOf" and (name, value) != ("default", None)}
    if len(choices) == 1:
        return {**rest, **choices[0]}
    return {**rest, **({"anyOf": choices} if choices else {})}


def _answers(one: Endpoint, names: Mapping[tuple[Any, str], str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind, bodies in one.answers.items():
        references = [{"$ref": names[body, "serialization"]} for body in bodies]
        if kind == EVENTS:
            found[kind] = {"x-event-schema": {"anyOf": references}} if references else {}
        elif not references:
            found[kind] = {"schema": {"type": "string"}}
        else:
            found[kind] = {"schema": references[0] if len(references) == 1 else {"anyOf": references}}
    return found


def _problems(one: Endpoint, names: Mapping[tuple[Any, str], str]) -> dict[str, Any]:
    content = {JSON: {"schema": {"$ref": names[ErrorAnswer, "serialization"]}}}
    of_all = {status: {"description": text, "content": content} for status, text in _PROBLEMS.items()}
    if one.path == "/health":
        of_all["503"] = {"description": "The server is stopping.", "content": _answers(one, names)}
    return of_all
