"""The common part of checkpoints for modules of transformers: their sizes, and the files that the sizes were read
from.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import field, frozen

from ...core.errors import UnsupportedModel
from ...core.model import LayerKV
from .files import changed_files
from .gguf_folder import file_of, settings_folder


@frozen(kw_only=True)
class DecoderShape:
    """The sizes of a decoder. The sizes of keys and values are those that its modules pass to attention."""

    layers: int
    kv_heads: int
    head_dim: int
    hidden: int  # numbers of one embedding, also in an encoder output
    vocabulary: int
    positions: int
    embeddings: int = 0  # the most rows of an encoder output that cross-attention reads
    recurrent: bool = False  # some layers are recurrent: a sequence has a state
    windows: tuple[int | None, ...] = field()  # for each layer the number of positions that it sees; None: all
    kv: tuple[LayerKV, ...] = field()  # for each layer; ``kv_heads`` and ``head_dim`` are the largest ones

    @windows.default
    def _all(self) -> tuple[int | None, ...]:
        return (None,) * self.layers

    @kv.default
    def _alike(self) -> tuple[LayerKV, ...]:
        return (LayerKV(heads=self.kv_heads, size=self.head_dim, value_size=self.head_dim),) * self.layers


@frozen(kw_only=True)
class AnyCheckpoint:
    """The facts that all kinds of checkpoints have in their files, apart from the weights."""

    folder: Path
    architecture: str
    tokenizer: Any = field(repr=False, eq=False)
    eos_token_ids: tuple[int, ...]
    suppress_token_ids: tuple[int, ...] = ()
    begin_suppress_token_ids: tuple[int, ...] = ()
    stamps: Mapping[str, str] = field(repr=False)  # a hash of each file that was read for this
    gguf: Path | None = field(repr=False)  # the file whose settings ``folder`` has; None: it is a checkpoint of its own

    @gguf.default
    def _file(self) -> Path | None:
        return file_of(self.folder)

    @property
    def place(self) -> Path:
        """The folder or the file that a user knows the checkpoint by."""
        return self.folder if self.gguf is None else self.gguf

    def restore(self) -> None:
        """Makes the settings of a GGUF file anew if they were removed.

        Raises:
            CheckpointError: the file is damaged or gone, or the folder cannot be written.
        """
        if self.gguf is not None:
            settings_folder(self.gguf)

    def changed_files(self) -> tuple[str, ...]:
        """Returns the files, except weights, that have changed since the checkpoint was read."""
        return changed_files(self.folder, self.stamps)


@frozen(kw_only=True)
class ModuleCheckpoint(AnyCheckpoint):
    """The facts in the files of a checkpoint for modules of transformers, apart from the weights."""

    config: Any = field(repr=False, eq=False)
    shape: DecoderShape
    allowed: str = field(repr=False)  # which models the engine computes, for the message of a refusal

    def identity(self, fingerprint: str, dtype: str) -> str:
        """Returns a hash of all that KV and encoder outputs depend on, except tokens, pixels and samples."""
        settings = {"files": dict(self.stamps), "weights": fingerprint, "dtype": dtype}
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def whole(folder: Path, config: Any, name: str) -> int:
    """Returns the number ``name`` of a transformers configuration.

    Raises:
        UnsupportedModel: the number is missing, or is not a positive integer.
    """
    value = getattr(config, name, None)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UnsupportedModel(
            f"{folder / 'config.json'} has {name}={value!r}; allowed: one integer, 1 or more, for all layers"
        )
    return value
