"""Records of passed comparisons in the user's cache. A comparison is not repeated for the same weights, code and
machine.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from attrs import frozen

from ..machine.cache import CacheFile
from ..machine.host import INSTRUCTIONS, cpu_flags, cpu_name, read_file

_KEPT = 200  # the number of latest comparisons to keep


@frozen
class PassedComparisons:
    """The comparisons that were passed: a file for each, so that two processes may add theirs at the same time."""

    folder: Path

    @classmethod
    def of_user(cls) -> PassedComparisons:
        """Opens the comparisons that engines of this user have passed."""
        return cls(CacheFile.of_user("comparisons").path)

    def once(self, key: str, prove: Callable[[], None]) -> None:
        """Calls ``prove`` unless an earlier call under this ``key`` returned without an error."""
        if self.has(key):
            return
        prove()
        CacheFile(self.folder / key).write({})
        with suppress(OSError):  # another process may remove them, too
            for old in sorted(self.folder.iterdir(), key=os.path.getmtime)[:-_KEPT]:
                old.unlink()

    def has(self, key: str) -> bool:
        """True if the comparison was passed."""
        return os.path.isfile(self.folder / key)


def comparison_key(
    stamps: Mapping[str, str], fingerprint: str, device: torch.device, dtype: torch.dtype, *computed: object
) -> str:
    """Returns a hash of all that the outcome of a comparison depends on: the checkpoint's files and weights, the
    device, the dtype, the further values ``computed``, the machine, and the code of the models."""
    import transformers

    depends = {
        "checkpoint": (dict(stamps), fingerprint),
        "device": (str(device), torch.cuda.get_device_name(device) if device.type == "cuda" else ""),
        "computed": (str(dtype), *map(str, computed)),
        "machine": machine_name(),
        "code": (transformers.__version__, _sources()),
    }
    return hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()


@cache  # a process runs what it has loaded
def _sources() -> str:
    """Returns a hash of the code of the models, with the native library."""
    models, sources = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted((*models.rglob("*.py"), *models.rglob("*.so"))):
        sources.update(f"{path.relative_to(models)}".encode() + path.read_bytes())
    return sources.hexdigest()


def machine_name() -> str:
    """Returns a name for this machine, with torch's version and the number of threads. The CPU's name alone is not
    enough, since virtual machines hide some instructions."""
    able = " ".join(sorted(cpu_flags(read_file) & INSTRUCTIONS))
    return f"{cpu_name(read_file)} ({able}), torch {torch.__version__}, {torch.get_num_threads()} threads"
