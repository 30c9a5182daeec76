"""A module of transformers as a holder of tensors: loaded, taken elsewhere, and emptied to the last byte."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from attrs import define, field
from torch import Tensor, nn

from ..core.errors import CheckpointError

_SAMPLE = 256  # values of each tensor that its fingerprint is made of


@define(eq=False)
class TransformerModel:
    """A loaded module of transformers, for inference."""

    _module: nn.Module | None = field(repr=False)

    @property
    def module(self) -> Any:
        """The module; typed loosely, since transformers' modules are."""
        assert self._module is not None, "the model is released"
        return self._module

    def to(self, device: torch.device) -> TransformerModel:
        """The same model with its tensors on ``device``; those that are there already are shared, not copied."""
        memo: dict[int, Any] = {}
        for tensor in _tensors(self.module):
            if id(tensor) not in memo:
                memo[id(tensor)] = _moved(tensor, device)
        return TransformerModel(copy.deepcopy(self._module, memo))

    def tensors(self) -> tuple[Tensor, ...]:
        """The weights and buffers."""
        return () if self._module is None else tuple(_tensors(self._module))

    def release(self) -> None:
        """Forgets every tensor. Modules may refer to each other in cycles, so each is emptied: the tensors die now,
        and nothing waits for the collector."""
        module, self._module = self._module, None
        for each in () if module is None else list(module.modules()):
            each._parameters.clear()
            each._buffers.clear()
            for name in [name for name, value in vars(each).items() if isinstance(value, Tensor)]:
                delattr(each, name)


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    """Parameters, buffers, and tensors that are neither; one that is shared comes several times."""
    for each in module.modules():
        for held in (each._parameters, each._buffers, vars(each)):
            for value in held.values():
                if isinstance(value, Tensor):
                    yield value


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    moved = tensor.detach().to(device)
    return nn.Parameter(moved, requires_grad=False) if isinstance(tensor, nn.Parameter) else moved


@define(eq=False)
class ModuleFiles:
    """The weights of a checkpoint as transformers reads them.

    ``fingerprint`` is there when they have been read: a hash of a sample of each tensor, enough that two trainings of
    one model differ.
    """

    folder: Path
    fingerprint: str = field(init=False, default="")

    def read(self, loader: str, *, dtype: torch.dtype, device: torch.device) -> TransformerModel:
        """The module that the class ``loader`` of transformers makes of the folder.

        Raises:
            CheckpointError: weights are missing, damaged or of other shapes.
        """
        model = TransformerModel(_load(self.folder, loader, dtype))
        self.fingerprint = _fingerprint(model.module)
        return model if device.type == "cpu" else model.to(device)


def _load(folder: Path, loader: str, dtype: torch.dtype) -> nn.Module:
    import transformers

    source = getattr(transformers, loader)
    with _quiet():
        try:
            module, told = source.from_pretrained(
                str(folder), dtype=dtype, local_files_only=True, output_loading_info=True
            )
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # transformers raises many kinds: wrapped, not hidden
            if "DefaultCPUAllocator" in str(error):
                raise
            raise CheckpointError(
                f"the weights of {folder} cannot be used: {type(error).__name__}: {error}; download or save the "
                "checkpoint again"
            ) from error
    _check(folder, told)
    loaded: nn.Module = module.eval().requires_grad_(False)
    _detach_from_files(loaded)
    return loaded


def _check(folder: Path, told: Mapping[str, Any]) -> None:
    """transformers fills up what is missing with random numbers, and only warns."""
    missing = sorted(name for name in told["missing_keys"] if "pooler" not in name.split("."))  # which nobody asks
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} weights, {missing[0]!r} among them; the checkpoint is incomplete"
        )
    if told["mismatched_keys"]:
        name, found, asked = min(told["mismatched_keys"])
        raise CheckpointError(
            f"weight {name!r} of {folder} has shape {tuple(found)}; config.json asks for {tuple(asked)}"
        )
    if told["error_msgs"]:
        raise CheckpointError(f"the weights of {folder} cannot be used: {'; '.join(told['error_msgs'])}")


def _detach_from_files(module: nn.Module) -> None:
    """No tensor may be a view of a mapped file, which may change, or pin more than itself."""
    for tensor in _tensors(module):
        if tensor.untyped_storage().nbytes() != tensor.nbytes or tensor.untyped_storage().filename is not None:
            tensor.data = tensor.detach().clone()


def _fingerprint(module: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        flat = tensor.detach().flatten()
        digest.update(flat[:: max(1, len(flat) // _SAMPLE)].float().cpu().numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers without its progress bars and its report of the load: what is wrong becomes an error."""
    from transformers.utils import logging

    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
