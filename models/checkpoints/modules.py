"""The common part of checkpoints whose modules are transformers': their sizes, and which files they were read from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import field, frozen

from ...core.errors import UnsupportedModel
from .files import changed_files


@frozen(kw_only=True)
class DecoderShape:
    """The sizes of a decoder; those of keys and values as its modules hand them to attention."""

    layers: int
    kv_heads: int
    head_dim: int
    hidden: int  # numbers of one embedding, of an encoder output too
    vocabulary: int
    positions: int
    embeddings: int = 0  # most rows of an encoder output that cross-attention reads
    windows: tuple[int | None, ...] = field()  # of each layer: how many positions it sees; None: all

    @windows.default
    def _all(self) -> tuple[int | None, ...]:
        return (None,) * self.layers


@frozen(kw_only=True)
class AnyCheckpoint:
    """The facts in a checkpoint's files that all kinds have, apart from the weights."""

    folder: Path
    architecture: str
    tokenizer: Any = field(repr=False, eq=False)
    eos_token_ids: tuple[int, ...]
    suppress_token_ids: tuple[int, ...]
    begin_suppress_token_ids: tuple[int, ...]
    stamps: Mapping[str, str] = field(repr=False)  # a hash of each file that all this was read from

    def changed_files(self) -> tuple[str, ...]:
        """The files beside the weights that are not what they were when this was read."""
        return changed_files(self.folder, self.stamps)


@frozen(kw_only=True)
class ModuleCheckpoint(AnyCheckpoint):
    """The facts in a checkpoint of transformers' modules."""

    config: Any = field(repr=False, eq=False)
    shape: DecoderShape
    allowed: str = field(repr=False)  # models that the engine computes, for a refusal

    def identity(self, fingerprint: str, dtype: str) -> str:
        """A hash of all that KV and encoder outputs depend on beside tokens, pixels and samples."""
        settings = {"files": dict(self.stamps), "weights": fingerprint, "dtype": dtype}
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def whole(folder: Path, config: Any, name: str) -> int:
    """The number ``name`` of a transformers configuration.

    Raises:
        UnsupportedModel: it is missing, or no positive integer.
    """
    value = getattr(config, name, None)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UnsupportedModel(
            f"{folder / 'config.json'} has {name}={value!r}; allowed: one integer, 1 or more, for all layers"
        )
    return value
