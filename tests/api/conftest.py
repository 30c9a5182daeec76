"""Fixtures for tests of `triolet.api`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image

from .hosts import HOSTS, Bench


@pytest.fixture(params=HOSTS, ids=lambda host: host.name)
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(request.param)


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
