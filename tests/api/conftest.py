"""Fixtures for tests of `triolet.api`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image

from triolet.models.networks.network import Feed
from triolet.models.speculation import HeadProposer

from ..checkpoints.families import make_checkpoint
from .hosts import HOSTS, Bench


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``made(family)`` is the folder of a tiny checkpoint. Each is made once, and nobody changes it."""
    return cache(lambda family: make_checkpoint(family, tmp_path_factory.mktemp("made") / family))


@pytest.fixture(scope="session")
def frame_references(made: Callable[[str], Path]) -> Callable[[str], Any]:
    """transformers' own CTC models and transducers, with what they have said so far."""
    from .test_frames import Reference

    return cache(lambda name: Reference.of(name, made(name)))


@pytest.fixture(params=HOSTS, ids=lambda host: host.name)
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(request.param)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the test runs: an empty one of its own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "red.png"
    Image.new("RGB", (40, 60), (200, 30, 30)).save(path)
    return path


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    path = tmp_path / "hum.wav"
    soundfile.write(path, 0.3 * np.sin(np.arange(8000) / 10), 16_000)
    return path


@pytest.fixture
def proposed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """What draft heads propose while the test runs: known tokens, and the tokens behind them."""
    found, plain = list[tuple[tuple[int, ...], tuple[int, ...]]](), HeadProposer.propose

    def propose(proposer: HeadProposer, feeds: Sequence[Feed]) -> list[tuple[int, ...]]:
        each = plain(proposer, feeds)
        found.extend((tuple(feed.record.tokens), own) for feed, own in zip(feeds, each, strict=True) if own)
        return each

    monkeypatch.setattr(HeadProposer, "propose", propose)
    return found
