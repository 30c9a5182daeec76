"""Fixtures for tests of `triolet.server`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from triolet import demo
from triolet.testing.families import make_checkpoint

from .served import Served, served

FAMILIES = ("llama", "qwen2_vl", "bert")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A small checkpoint of each kind, by its name."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for family in FAMILIES:
        make_checkpoint(family, folder / family)
    return {"whisper": demo.checkpoint(), **{family: str(folder / family) for family in FAMILIES}}


@pytest.fixture(scope="module")
def service(models: dict[str, str]) -> Iterator[Served]:
    """A server of one model of each kind."""
    with served(models) as running:
        yield running


@pytest.fixture(scope="session")
def speech() -> Path:
    """A short sentence in English, which the model "whisper" understands."""
    return next(sample.path for sample in demo.samples() if "en-command" in str(sample.path))
