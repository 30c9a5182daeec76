"""Tensors of a checkpoint that are read when they are needed, so that a model can be packed matrix by matrix and is
never held as it was read.

transformers renames, splits and joins the weights of a checkpoint. Experts, for one, it stacks. It does so with these
tensors too, whose joins are not read either.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from .stored import SAMPLE, StoredTensor

_ATEN = torch.ops.aten
_JOINS: dict[Any, Callable[..., Tensor]] = {_ATEN.stack.default: torch.stack, _ATEN.cat.default: torch.cat}


@frozen(eq=False)
class _Joined:
    """A join of ``tensors`` by ``torch.stack`` or ``torch.cat``."""

    join: Callable[..., Tensor]
    tensors: list[UnreadTensor]
    dim: int

    @property
    def has_parts(self) -> bool:
        """True if `part` can be called."""
        if any(tensor.kept for tensor in self.tensors):  # they may have been changed
            return False
        if self.dim == 0:
            return self.join is torch.stack
        return self.join is torch.cat and all(tensor.source.has_parts for tensor in self.tensors)

    def part(self, index: int) -> StoredTensor | _Joined | _Derived:
        """Returns the values at ``index`` of the first dimension."""
        if self.dim == 0:
            return self.tensors[index].source
        parts = [UnreadTensor(one.shape[1:], one.dtype, one.source.part(index)) for one in self.tensors]
        return _Joined(torch.cat, parts, self.dim - 1)

    def read(self, dtype: torch.dtype) -> Tensor:  # noqa: ARG002
        """Reads the values."""
        return self.join([tensor.read() for tensor in self.tensors], self.dim)

    @property
    def block_kind(self) -> str | None:
        """The kind of the blocks that `blocks` gives; ``None``: the tensors are not of one kind, or not joined row by
        row."""
        kinds = {(tensor.block_kind, tensor.shape[1:]) for tensor in self.tensors}
        by_row = self.dim == 0 and (self.join is torch.cat or self.tensors[0].dim() > 1)
        ordered = len(self.tensors) > 1 and any(tensor.input_order is not None for tensor in self.tensors)
        return self.tensors[0].block_kind if by_row and len(kinds) == 1 and not ordered else None

    @property
    def input_order(self) -> Tensor | None:
        """The order of the inputs, as `StoredTensor.input_order`."""
        return self.tensors[0].input_order

    def blocks(self, start: int, stop: int) -> Tensor:
        """Returns the blocks of some rows, as `GgufTensor.blocks` does."""
        found, before = list[Tensor](), 0
        for tensor in self.tensors:
            rows = prod(tensor.shape[:-1])
            low, high = max(0, start - before), min(rows, stop - before)
            if low < high:
                found.append(tensor.source.blocks(low, high))
            before += rows
        return torch.cat(found) if found else self.tensors[0].source.blocks(0, 0)

    def sample(self) -> Iterator[Tensor]:
        """Yields a few values of each stored tensor."""
        for tensor in self.tensors:
            yield from tensor.source.sample()


@frozen(eq=False)
class _Derived:
    """The values that ``make`` makes of those of ``tensor``."""

    tensor: UnreadTensor
    make: Callable[[Tensor], Tensor]
    order: Tensor | None  # which of its rows each row is; None: other values
    has_parts = False

    def part(self, index: int) -> StoredTensor:
        """Raises `NotImplementedError`."""
        raise NotImplementedError(f"part {index} of values that are made of others")

    def read(self, dtype: torch.dtype) -> Tensor:  # noqa: ARG002
        """Reads the values."""
        return self.make(self.tensor.read())

    @property
    def block_kind(self) -> str | None:
        """The kind of the blocks that `blocks` gives; ``None``: the rows are not those of the tensor."""
        return None if self.order is None else self.tensor.block_kind

    @property
    def input_order(self) -> Tensor | None:
        """The order of the inputs, as `StoredTensor.input_order`."""
        return self.tensor.input_order

    def blocks(self, start: int, stop: int) -> Tensor:
        """Returns the blocks of some rows, as `GgufTensor.blocks` does."""
        assert self.order is not None, "other values have no blocks"
        wanted = self.order[start:stop]  # heads lie together, so runs are long
        runs = wanted.tensor_split(torch.nonzero(wanted.diff() != 1)[:, 0] + 1)
        found = [self.tensor.blocks_of(int(run[0]), int(run[-1]) + 1) for run in runs if len(run)]
        return torch.cat(found) if found else self.tensor.blocks_of(0, 0)

    def sample(self) -> Iterator[Tensor]:
        """Yields a few values of each stored tensor."""
        return self.tensor.source.sample()


class UnreadTensor(Tensor):
    """A tensor on the CPU whose values are read when something is computed with them, and kept from then on. Joins of
    such tensors are such tensors themselves.

    Args:
        kept: the values, if they have been read. Aliases share this list.
    """

    source: StoredTensor | _Joined | _Derived
    kept: list[Tensor]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: Any, shape: Any, dtype: torch.dtype, source: Any, kept: list[Tensor] | None = None) -> Any:
        with torch.inference_mode(False):  # a parameter cannot be made of an inference tensor
            made = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
        made.source, made.kept = source, [] if kept is None else kept
        return made

    def read(self) -> Tensor:
        """Returns the values. They are not kept."""
        return self.kept[0] if self.kept else self.source.read(self.dtype)

    @property
    def block_kind(self) -> str | None:
        """The kind of blocks that the matrix is stored in, as the package ``gguf`` names it; ``None``: plain numbers,
        blocks of several kinds, or values that have been read and may have been changed."""
        return None if self.kept else self.source.block_kind

    @property
    def input_order(self) -> Tensor | None:
        """The input that each input of the blocks is, int32; ``None``: the same one."""
        return self.source.input_order

    def blocks_of(self, start: int, stop: int) -> Tensor:
        """Returns the blocks of the rows from ``start`` to ``stop``, as uint8 [rows, bytes of a row], if there is a
        `block_kind`. All dimensions but the last count as rows."""
        return self.source.blocks(start, stop)

    def unread_part(self, index: int) -> UnreadTensor | None:
        """Returns the values at ``index`` of the first dimension, unread; ``None``: they cannot be read alone."""
        if self.kept or not self.source.has_parts:
            return None
        made: UnreadTensor = UnreadTensor(self.shape[1:], self.dtype, self.source.part(index))
        return made

    @property
    def derived_from(self) -> UnreadTensor | None:
        """The tensor that `derived` made this one of; ``None``: it did not, or this one may have been changed."""
        return self.source.tensor if isinstance(self.source, _Derived) and not self.kept else None

    def joined_rows(self) -> list[UnreadTensor]:
        """Returns the tensors that this one joins row by row, or this one alone."""
        own = self.source
        if isinstance(own, _Joined) and own.join is torch.cat and own.dim == 0 and not self.kept:
            return own.tensors
        return [self]

    def read_part(self, index: int) -> Tensor:
        """Returns the values at ``index`` of the first dimension. They are read alone if they can be."""
        if self.kept or not self.source.has_parts:
            return self._keep()[index]
        return self.source.part(index).read(self.dtype)

    def read_rows(self, start: int, stop: int) -> Tensor:
        """Returns the values from ``start`` to ``stop`` of the first dimension. They are read alone if they can be."""
        if self.kept or not isinstance(self.source, StoredTensor):
            return self._keep()[start:stop]
        rows = range(len(self))[start:stop]
        return self.source.cut(rows.start * prod(self.shape[1:]), (len(rows), *self.shape[1:])).read(self.dtype)

    def _keep(self) -> Tensor:
        with torch.inference_mode(False):
            self.kept[:] = [self.read()]
        return self.kept[0]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        first = args[0]
        if func is _ATEN.detach.default:
            return cls(first.shape, first.dtype, first.source, first.kept)
        if func in _JOINS and all(type(one) is cls and not one.kept and one.dtype == first[0].dtype for one in first):
            dim = args[1] if len(args) > 1 else 0
            shape = _JOINS[func]([torch.empty(one.shape, device="meta", dtype=one.dtype) for one in first], dim).shape
            return cls(shape, first[0].dtype, _Joined(_JOINS[func], list(first), dim % len(shape)))
        args, kwargs = tree_map_only(cls, cls._keep, (args, kwargs or {}))
        return func(*args, **kwargs)


def derived(tensor: Tensor, make: Callable[[Tensor], Tensor], order: Tensor | None = None) -> Tensor:
    """Returns what ``make`` makes of a tensor, unread if that is. With an ``order``, which of its rows each row is, the
    rows may stay in their blocks."""
    if not isinstance(tensor, UnreadTensor):
        return make(tensor)
    shape = make(torch.empty(tensor.shape, device="meta", dtype=tensor.dtype)).shape
    found: Tensor = UnreadTensor(shape, tensor.dtype, _Derived(tensor, make, order))
    return found


def read_all(module: nn.Module) -> None:
    """Reads what is unread of a module, one tensor after the other. Tensors that modules share stay shared."""
    read: dict[int, tuple[Tensor, Tensor]] = {}  # keeps each tensor, so that no other gets its id
    for each in module.modules():
        stores: tuple[dict[str, Any], ...] = (each._parameters, each._buffers, vars(each))
        for held in stores:
            for key, tensor in list(held.items()):
                if not isinstance(tensor, UnreadTensor):
                    continue
                if id(tensor.kept) not in read:
                    read[id(tensor.kept)] = tensor, nn.Parameter(tensor.read(), requires_grad=False)
                made = read[id(tensor.kept)][1]
                held[key] = made if isinstance(tensor, nn.Parameter) else made.detach()


def fingerprint_of(module: nn.Module) -> str:
    """Returns a hash of a sample of each tensor, or of each stored tensor in it. The sample is large enough that two
    trainings of one model differ."""
    digest = hashlib.sha256()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        for part in tensor.source.sample() if isinstance(tensor, UnreadTensor) else (tensor,):
            flat = part.detach().flatten()
            digest.update(flat[:: max(1, len(flat) // SAMPLE)].float().cpu().numpy().tobytes())
    return digest.hexdigest()


@frozen(eq=False, kw_only=True)
class UnreadSlice(StoredTensor):
    """A stored tensor of which transformers makes an `UnreadTensor`, unless it is a vector."""

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        if len(self.shape) < 2:
            return self.read(dtype or self.dtype, device)
        made: Tensor = UnreadTensor(self.shape, dtype or self.dtype, self)
        return made
