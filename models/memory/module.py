"""A module as a holder of tensors: it is loaded, copied to other devices, and emptied completely."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from attrs import define, field
from torch import Tensor, nn

from .allocator import ROOMY, large_empty, trim

_CHUNK = 64 << 20  # the most bytes of weights that `gather` moves before it returns what they left
_LEAST = 4_096  # bytes of a tensor that `gather` moves


@define(eq=False)
class TransformerModel:
    """A loaded module of transformers or of Whisper, for inference."""

    _module: nn.Module | None = field(repr=False)

    @property
    def module(self) -> Any:
        """The module. Its type is ``Any``, since attributes of transformers' modules have no precise types."""
        assert self._module is not None, "the model is released"
        return self._module

    def to(self, device: torch.device) -> TransformerModel:
        """Returns the same model with its tensors on ``device``. Tensors that are already there are shared."""
        module = copy.deepcopy(self._module, {id(tensor): tensor for tensor in _tensors(self.module)})
        moved = TransformerModel(module)
        moved.move(device)
        return moved

    def move(self, device: torch.device, *, copied: bool = False) -> None:
        """Moves the tensors to ``device``. Tensors that are already there stay unless ``copied`` is true."""
        places = list(_places(self.module))  # all originals live on meanwhile: no two have one identity
        moved: dict[int, Tensor] = {}  # by the identity of the original: modules may share a tensor
        for held, key, value in places:
            if id(value) not in moved:
                moved[id(value)] = _moved(value, device, copied=copied)
            held[key] = moved[id(value)]

    def gather(self) -> None:
        """Moves the matrices that are on the CPU into memory of large pages, some at a time: most are smaller than a
        large page. Tensors that modules share stay shared; those below `_LEAST` bytes are not moved, nor are large
        packed ones, which `roomy_empty` has put there."""
        places: dict[int, list[tuple[Any, Any]]] = {}
        for held, key, value in _places(self.module):
            packed = value.nbytes >= ROOMY and value.dim() != 2  # as `Panels` are, in large pages from the first
            if value.device.type == "cpu" and value.nbytes >= _LEAST and not packed:
                places.setdefault(id(value), []).append((held, key))
        whole = sum(held[key].nbytes for (held, key), *_ in places.values())
        chunk = min(_CHUNK, max(_CHUNK, whole) // 16)  # what is moved is held twice
        waiting, size = list[list[tuple[Any, Any]]](), 0
        trim()
        for number, place in enumerate(places.values(), 1):
            waiting.append(place)
            size += _rounded(place[0][0][place[0][1]].nbytes)
            if size >= chunk or number == len(places):
                _move(waiting, large_empty((size,), torch.uint8))
                waiting, size = [], 0
                trim()  # returns what the moved tensors left

    def tensors(self) -> tuple[Tensor, ...]:
        """Returns the weights and buffers."""
        return () if self._module is None else tuple(_tensors(self._module))

    def release(self) -> None:
        """Forgets every tensor. Modules may refer to each other in cycles, so each module is emptied: the tensors die
        now and do not wait for the garbage collector."""
        module, self._module = self._module, None
        for each in () if module is None else list(module.modules()):
            each._parameters.clear()
            each._buffers.clear()
            vars(each).pop("_flat_weights", None)
            for name in [name for name, value in vars(each).items() if isinstance(value, Tensor)]:
                delattr(each, name)


@contextmanager
def forwards(instead: Sequence[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Replaces the ``forward`` of each module by the function beside the module, within the block."""
    previous: list[Any] = [vars(module).get("forward") for module, _ in instead]
    try:
        for module, forward in instead:
            vars(module)["forward"] = forward
        yield
    finally:
        for (module, _), own in zip(instead, previous, strict=True):
            vars(module).pop("forward", None)
            if own is not None:  # the module had an own ``forward``
                vars(module)["forward"] = own


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yields parameters, buffers, and tensors that are neither. A tensor that modules share is yielded several
    times."""
    return (tensor for _, _, tensor in _places(module))


def _places(module: nn.Module) -> Iterator[tuple[Any, Any, Tensor]]:
    """Yields what holds each tensor of a module, its key there, and the tensor."""
    for each in module.modules():
        listed = vars(each).get("_flat_weights", [])  # the parameters of an LSTM, once more
        for held in (each._parameters, each._buffers, vars(each), listed):
            for key, value in list(enumerate(held) if isinstance(held, list) else held.items()):
                if isinstance(value, Tensor):
                    yield held, key, value


def _move(places: list[list[tuple[Any, Any]]], room: Tensor) -> None:
    """Moves tensors into ``room``, one after the other. Each has at least one place: what holds it, and its key
    there."""
    used = 0
    for place in places:
        old = place[0][0][place[0][1]]
        new = room[used : used + old.nbytes].view(old.dtype).view(old.shape).copy_(old.detach())
        if old.is_contiguous():  # strides of dimensions of size 1 count for nobody but torch, as those of channels_last
            new = new.as_strided(old.shape, old.stride())
        if isinstance(old, nn.Parameter):
            new = nn.Parameter(new, requires_grad=False)
        for held, key in place:
            held[key] = new
        used += _rounded(old.nbytes)


def _rounded(size: int) -> int:
    """Returns ``size`` rounded up to whole cache lines of 64 bytes."""
    return -(-size // 64) * 64


def _moved(tensor: Tensor, device: torch.device, *, copied: bool) -> Tensor:
    moved = tensor.detach().to(device, copy=copied).contiguous()
    return nn.Parameter(moved, requires_grad=False) if isinstance(tensor, nn.Parameter) else moved


@define(eq=False)
class ModuleFiles:
    """The weights of a checkpoint as transformers reads them."""

    fingerprint: str = field(init=False, default="")  # see `fingerprint_of`; empty until the weights are read
