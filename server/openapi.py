"""``/openapi.json``: an OpenAPI 3.1 document of the endpoints, made from the same bodies that check requests."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from .endpoints.table import EVENTS, JSON, Endpoint
from .schemas.base import ErrorAnswer

_REF = "#/components/schemas/{model}"
_PATH_PART = re.compile(r"\{(\w+):path\}")
_PROBLEMS = {
    "400": "The request has a value that is not allowed.",
    "401": "The API key is missing or wrong.",
    "403": "The origin, the host or an address in the request is not allowed.",
    "404": "There is no such model, or no such path.",
    "408": "The request did not arrive in time.",
    "409": "The state of the engine does not allow the request.",
    "413": "The request, or what it asks for, is too large.",
    "415": "The type of the body, the audio or the image is not allowed.",
    "422": "An address in the request could not be fetched, or the model is not supported.",
    "429": "There are too many requests. Retry-After says when to try again.",
    "500": "The engine or the server failed on the request.",
    "503": "The server or the engine is stopping, or the engine sleeps.",
    "507": "The server has no room to store the request.",
}


def openapi(endpoints: Sequence[Endpoint], version: str, models: Iterable[str], *, keys: bool) -> dict[str, Any]:
    """Returns the document. ``models``: the names of models that requests may use. ``keys``: true if requests need an
    API key."""
    allowed = list(models)
    names, schemas = _schemas(endpoints)
    for name, schema in schemas.items():
        if name.endswith("Request"):
            schema["properties"]["model"]["enum"] = allowed
    paths: dict[str, dict[str, Any]] = {}
    for one in endpoints:
        operation = _operation(one, names, allowed)
        paths.setdefault(_PATH_PART.sub(r"{\1}", one.path), {})[one.method.lower()] = operation
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Triolet", "version": version, "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"}},
        "paths": paths,
        "components": {"schemas": schemas},
    }
    if keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _schemas(endpoints: Sequence[Endpoint]) -> tuple[dict[tuple[Any, str], str], dict[str, Any]]:
    """Returns a reference for each body of a request ("validation") or answer ("serialization"), and all schemas."""
    bodies: dict[tuple[type[BaseModel], Any], None] = {(ErrorAnswer, "serialization"): None}
    for one in endpoints:
        if one.body is not None:
            bodies[one.body, "validation"] = None
        for kinds in one.answers.values():
            bodies.update({(kind, "serialization"): None for kind in kinds})
    found, document = models_json_schema(list(bodies), ref_template=_REF)
    return {key: value["$ref"] for key, value in found.items()}, document["$defs"]


def _operation(one: Endpoint, names: Mapping[tuple[Any, str], str], models: list[str]) -> dict[str, Any]:
    told: dict[str, Any] = {
        "operationId": one.handle.__name__,
        "tags": [one.tag],
        "summary": " ".join((one.handle.__doc__ or "").split()),
        "responses": {"200": {"description": "The answer.", "content": _answers(one, names)}, **_problems(one, names)},
    }
    if one.body is not None and one.is_form:
        content = {"multipart/form-data": {"schema": _form(one.body, models)}}
        told["requestBody"] = {"required": True, "content": content}
    elif one.body is not None:
        content = {JSON: {"schema": {"$ref": names[one.body, "validation"]}}}
        told["requestBody"] = {"required": True, "content": content}
    for name in _PATH_PART.findall(one.path):
        schema = {"type": "string", "minLength": 1}
        told.setdefault("parameters", []).append({"name": name, "in": "path", "required": True, "schema": schema})
    return told


def _form(body: type[BaseModel], models: list[str]) -> dict[str, Any]:
    """Returns the schema of a form. The file comes first, lists are named ``name[]``, and no member may be null, since
    clients leave a member out instead."""
    schema = body.model_json_schema(ref_template=_REF)
    members: dict[str, Any] = {"file": {"type": "string", "contentMediaType": "application/octet-stream"}}
    for name, member in schema["properties"].items():
        choices = [one for one in member.pop("anyOf", ()) if one != {"type": "null"}]
        if member.get("default", ...) is None:
            del member["default"]
        if choices:
            member.update(choices[0] if len(choices) == 1 else {"anyOf": choices})
        members[f"{name}[]" if member.get("type") == "array" else name] = member
    members["model"]["enum"] = models
    return {
        "type": "object",
        "properties": members,
        "required": ["file", *schema.get("required", ())],
        "additionalProperties": False,
    }


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
