"""Fixtures for tests of `triolet.server`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from triolet import demo

from ..checkpoints.families import make_checkpoint
from ..models.conftest import make_model, save_checkpoint
from .openai_client import openai_client
from .served import Served, served

FAMILIES = ("llama", "qwen3", "qwen2_vl", "qwen2_audio", "bert")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A small checkpoint of each kind, by its name."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for family in FAMILIES:
        make_checkpoint(family, folder / family)
    random = save_checkpoint(folder / "whisper_random", make_model())  # it takes text before, which the demo does not
    made = {family: str(folder / family) for family in FAMILIES}
    return {"whisper": demo.checkpoint(), "whisper_random": str(random), **made}


@pytest.fixture(scope="module")
def service(models: dict[str, str]) -> Iterator[Served]:
    """A server of one model of each kind."""
    with served(models) as running:
        yield running


@pytest.fixture(scope="session")
def speech() -> Path:
    """A short sentence in English, which the model "whisper" understands."""
    return next(sample.path for sample in demo.samples() if "en-command" in str(sample.path))


@pytest.fixture
def client(service: Served) -> Iterator[openai.OpenAI]:
    """OpenAI's client of the server; it holds answers to the shapes that it knows."""
    with openai_client(service, _strict_response_validation=True) as one:
        yield one
