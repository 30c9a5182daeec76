"""Opens the tensors of a checkpoint's file, whatever its format."""

from __future__ import annotations

import zipfile
from pathlib import Path

import torch
from torch import Tensor

from ...core.errors import CheckpointError
from .ctranslate2_file import MODEL
from .ctranslate2_weights import whisper_tensors
from .gguf_folder import NOTE
from .gguf_tensors import noted_tensors
from .stored import MappedTensor, StoredTensor, stored_tensors


def open_weights(path: Path) -> dict[str, StoredTensor | MappedTensor]:
    """Opens the tensors of a file, by transformers' names. Raises `CheckpointError` if the file is damaged."""
    if path.suffix == ".safetensors":
        return dict(stored_tensors(path))
    if path.name == NOTE:
        return dict(noted_tensors(path))
    if path.name == MODEL:
        return dict(whisper_tensors(path))
    try:  # only zip archives, which torch writes since 1.6, can be mapped
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        return {str(name): MappedTensor(value) for name, value in loaded.items() if isinstance(value, Tensor)}
    except Exception as error:  # a damaged archive raises many kinds: wrapped, not hidden
        raise CheckpointError(f"{path} cannot be read: {error}; save the checkpoint again, as safetensors") from error
