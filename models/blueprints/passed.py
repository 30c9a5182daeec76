"""Trials that were passed before, in the user's cache: the same weights, code and machine pass them again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from attrs import frozen

from ...core.config import EngineConfig
from ..linear.choice import machine_name
from ..machine.cache import CacheFile

_KEPT = 200  # the latest


@frozen
class PassedTrials:
    """What was passed, by hashes."""

    file: CacheFile

    @classmethod
    def of_user(cls) -> PassedTrials:
        """Those that this user's engines remember."""
        return cls(CacheFile.of_user("trials.json"))

    def once(self, key: str, prove: Callable[[], None]) -> None:
        """Calls ``prove``, unless it has returned before under this ``key``."""
        if key in self._passed():
            return
        prove()
        self.file.write({"passed": [*self._passed(), key][-_KEPT:]})

    def _passed(self) -> list[str]:
        passed = self.file.read().get("passed")
        return passed if isinstance(passed, list) else []


def trial_key(
    stamps: Mapping[str, str], fingerprint: str, config: EngineConfig, device: torch.device, dtype: torch.dtype
) -> str:
    """A hash of all that a trial's outcome depends on: the checkpoint's files and weights, how they are computed, the
    machine, and the code, this package's included."""
    import transformers

    models = Path(__file__).parents[1]
    sources = sorted((path.name, path.stat().st_mtime_ns) for path in models.rglob("*.py"))
    depends = {
        "checkpoint": (dict(stamps), fingerprint),
        "computed": (str(device), str(dtype), config.quantization, config.compile),
        "machine": machine_name(),
        "code": (transformers.__version__, sources),
    }
    return hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()
