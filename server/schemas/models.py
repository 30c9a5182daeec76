"""The models that are served: ``/v1/models``, and the server's health."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ...core.residency import ModelState
from .base import AnswerBody


class Model(AnswerBody):
    """A model that is served. ``state`` says whether it is loaded; the first request loads it. ``max_model_len``: the
    most positions of a prompt and its answer together; null until the model is loaded."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    state: ModelState
    max_model_len: int | None


class ModelList(AnswerBody):
    """The answer of ``/v1/models``."""

    object: Literal["list"]
    data: list[Model]


class Health(AnswerBody):
    """The answer of ``/health``. ``live``: the process answers. ``ready``: requests are taken. ``draining``: the server
    is stopping. ``sleeping``: those of the loaded models that sleep. A server with keys gives the names to requests
    with a key alone."""

    live: bool
    ready: bool
    draining: bool
    running: int
    sleeping: list[str] = Field(default_factory=list)
    models: dict[str, ModelState] = Field(default_factory=dict)
