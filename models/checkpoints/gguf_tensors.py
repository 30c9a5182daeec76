"""The tensors of GGUF files, under the names and in the order of rows that transformers' models have.

A matrix is stored in rows of blocks. Values are decoded as the package ``gguf`` decodes them, some rows at a time;
`GgufTensor.blocks` gives the blocks themselves. Blocks lie along a row, so rows can be moved without decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from functools import partial
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from attrs import evolve, frozen
from torch import Tensor

from ...core.errors import CheckpointError
from .gguf_file import PLAIN, GgufFile, Listed, Placed
from .gguf_folder import header_key
from .gguf_models import DeltaHeads, architecture_of, delta_heads, heads_of, name_of, shares_of
from .gguf_settings import Told
from .gguf_speech import speech_name, speech_of
from .settings import read_json
from .stored import StoredTensor
from .unread import UnreadTensor, derived
from .whisper_ggml import MAGIC as WHISPER
from .whisper_ggml import read_model, whisper_name

_PIECE = 1 << 18  # values that are decoded at once, some of whose steps have several times their bytes


@frozen(eq=False, kw_only=True)
class GgufTensor(StoredTensor):
    """A tensor of a GGUF file, or a part of one. ``begin`` is the place of the whole tensor."""

    width: int  # values of a row in the file
    row: int  # bytes of a row
    first: int = 0  # values of the tensor before this part
    order: np.ndarray[Any, Any] | None = None  # which of the file's rows each row is; None: the same
    columns: np.ndarray[Any, Any] | None = None  # which of the file's columns each column is
    change: Callable[[Tensor], Tensor] | None = None  # what undoes the converter's change of each value
    lazily: bool = False  # matrices become `UnreadTensor`

    @classmethod
    def placed(cls, name: str, at: Placed, *, lazily: bool = False) -> Self:
        """Returns the tensor at a place."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        values, size = GGML_QUANT_SIZES[GGMLQuantizationType[at.kind]]
        width = at.shape[-1]
        return cls(
            path=at.path,
            name=name,
            begin=at.begin,
            kind=at.kind,
            shape=at.shape,
            width=width,
            row=width // values * size,
            lazily=lazily,
        )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of decoded values."""
        return torch.float32

    @property
    def narrowest(self) -> torch.dtype:
        """The dtype of the fewest bits that holds every decoded value."""
        return {"F16": torch.float16, "BF16": torch.bfloat16}.get(self.kind, torch.float32)

    @property
    def block_kind(self) -> str | None:
        """The kind of the blocks; ``None``: the file has plain numbers, or this part is not made of whole rows."""
        whole = self.first % self.width == 0 and self.shape[-1:] == (self.width,)
        return None if self.kind in PLAIN or self.change is not None or not whole else self.kind

    @property
    def input_order(self) -> Tensor | None:
        """The input that each input of the blocks is, int32; ``None``: the same one."""
        return None if self.columns is None else torch.from_numpy(np.argsort(self.columns).astype(np.int32))

    def blocks(self, start: int, stop: int) -> Tensor:
        """Returns the blocks of the rows from ``start`` to ``stop`` as uint8: [rows, bytes of a row]. All dimensions
        but the last count as rows.

        Raises:
            CheckpointError: the file cannot be read, or has become shorter.
        """
        rows = range(prod(self.shape[:-1]))[start:stop]
        before = self.first // self.width
        return torch.from_numpy(self._rows(before + rows.start, before + max(rows.start, rows.stop)))

    def _rows(self, start: int, stop: int) -> np.ndarray[Any, Any]:
        """The bytes of rows, in memory of their own."""
        if self.order is None or start >= stop:
            return self._bytes(start, stop)
        wanted: np.ndarray[Any, Any] = self.order[start:stop]
        low, high = int(wanted.min()), int(wanted.max()) + 1  # rows are moved within a head, so these are not far
        moved: np.ndarray[Any, Any] = self._bytes(low, high)[wanted - low]
        return moved

    def _bytes(self, start: int, stop: int) -> np.ndarray[Any, Any]:
        found = np.empty(max(0, stop - start) * self.row, np.uint8)
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self.begin + start * self.row)
                room = found.data
                while room and (count := file.readinto(room)):
                    room = room[count:]
        except OSError as error:
            raise CheckpointError(f"weight {self.name!r} of {self.path} cannot be read: {error}") from error
        if room:
            raise CheckpointError(f"weight {self.name!r} of {self.path} cannot be read: the file ends within it")
        return found.reshape(-1, self.row)

    def pieces(self) -> Generator[Tensor, None, None]:
        """Yields the decoded values in order.

        Raises:
            CheckpointError: the file cannot be read, or has become shorter.
        """
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        kind, end = GGMLQuantizationType[self.kind], self.first + prod(self.shape)
        step = max(1, _PIECE // self.width)
        for start in range(self.first // self.width, -(-end // self.width), step):
            stop = min(start + step, -(-end // self.width))
            with np.errstate(all="ignore"):  # scales may be infinite
                rows = dequantize(self._rows(start, stop), kind).reshape(stop - start, -1)
            values = torch.from_numpy(rows if self.columns is None else rows[:, self.columns]).reshape(-1)
            before = start * self.width
            values = values[max(0, self.first - before) : end - before]
            yield values if self.change is None else self.change(values)

    def cut(self, first: int, shape: tuple[int, ...]) -> Self:
        """Returns the values from the one with the number ``first`` on, as a tensor of ``shape``."""
        return evolve(self, first=self.first + first, shape=shape)

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        """Returns the tensor in another dtype, as transformers asks for it."""
        if not self.lazily or len(self.shape) < 2:
            return self.read(dtype or self.dtype, device)
        made: Tensor = UnreadTensor(self.shape, dtype or self.dtype, self)
        return made

    def get_dtype(self) -> str:
        """Returns the dtype of decoded values, as a file of safetensors would name it."""
        return "F32"


def _rows_after_rows(parts: list[Tensor]) -> Tensor:
    first, second = parts
    return torch.cat([first, second], first.dim() - 2)


def _interleaved(parts: list[Tensor]) -> Tensor:
    """Joins gates and other inputs of experts one after the other, as [experts, inputs, outputs]."""
    first, second = parts
    return derived(torch.cat([first, second], 1), _by_turns)


def _by_turns(joined: Tensor) -> Tensor:
    experts, outputs, *inputs = joined.shape
    found = joined.new_empty(experts, *inputs, outputs)
    rows = found.transpose(1, 2) if inputs else found
    rows[:, ::2], rows[:, 1::2] = joined.chunk(2, 1)
    return found


def _turned_over(parts: list[Tensor]) -> Tensor:
    (part,) = parts
    return derived(part, _turned)


def _turned(part: Tensor) -> Tensor:
    return part.transpose(-1, -2).contiguous()


def _in_order(parts: list[Tensor], order: Tensor) -> Tensor:
    joined = torch.cat(parts)
    if len(joined) != len(order):
        raise ValueError(f"{len(joined)} rows of {len(order)}")
    return derived(joined, lambda rows: rows[order.to(rows.device)], order)


def _latent(parts: list[Tensor]) -> Tensor:
    """Joins what makes keys [heads, latent, size] and values [heads, size, latent] of latent numbers."""
    keys, values = parts
    return torch.cat([keys.transpose(1, 2), values], 1).flatten(0, 1)


JOINS: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "self_attn.kv_b_proj.weight": _latent,
    "mlp.experts.gate_up_proj": _interleaved,
    "mlp.experts.gate_up_proj_bias": _interleaved,
    **dict.fromkeys(("mlp.experts.down_proj", ".c_attn.weight", ".c_proj.weight", ".c_fc.weight"), _turned_over),
}
"""How tensors are joined that transformers has as one, by the end of its name; others row after row."""


@frozen(eq=False, kw_only=True)
class JoinedTensor(StoredTensor):
    """A tensor that the file has in parts. It stays in blocks if they are rows of it, or of what it is made of."""

    parts: tuple[GgufTensor, ...]
    join: Callable[[list[Tensor]], Tensor]
    has_parts = False

    @classmethod
    def of(cls, name: str, parts: Mapping[int, GgufTensor], order: np.ndarray[Any, Any] | None = None) -> Self:
        """Returns the tensor ``name``. Raises `CheckpointError` if parts are missing, or do not belong together."""
        first = next(iter(parts.values()))
        join = next((JOINS[end] for end in JOINS if name.endswith(end)), _rows_after_rows)
        join = partial(_in_order, order=torch.from_numpy(order)) if order is not None else join
        ordered = tuple(parts[number] for number in sorted(parts))
        try:
            shape = tuple(join([torch.empty(one.shape, device="meta", dtype=one.dtype) for one in ordered]).shape)
        except (ValueError, RuntimeError, IndexError) as error:
            told = ", ".join(f"{one.name} {one.shape}" for one in ordered)
            raise CheckpointError(f"{first.path} has only {told} for {name}: {error}; download it again") from error
        return cls(path=first.path, name=name, begin=first.begin, kind="F32", shape=shape, parts=ordered, join=join)

    def pieces(self) -> Generator[Tensor, None, None]:
        """Yields all decoded values at once."""
        yield self.join([one.read(torch.float32) for one in self.parts]).reshape(-1)

    @property
    def block_kind(self) -> str | None:
        """The kind of the blocks of all parts, of experts perhaps the largest of several; ``None``: not in blocks."""
        kinds = {one.block_kind: one.row for one in self.parts}
        if None in kinds or self.join is _latent or (len(kinds) > 1 and len(self.shape) < 3):
            return None
        return max(kinds, key=lambda kind: kinds[kind])

    @property
    def turned(self) -> bool:
        """True if inputs come before outputs, which are the rows of the blocks."""
        return self.join is _turned_over or (self.join is _interleaved and len(self.shape) == 3)

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        """Returns the tensor in another dtype, unread where it may stay in blocks."""
        return self.join([one.to(device, dtype) for one in self.parts])

    def sample(self) -> Iterator[Tensor]:
        """Yields a few values of each part."""
        for one in self.parts:
            yield from one.sample()


def noted_tensors(note: Path, *, lazily: bool = False) -> dict[str, StoredTensor]:
    """Returns `named_tensors` of the file that a note in a folder of settings names.

    Raises:
        CheckpointError: the file is damaged, or is not the one that the settings were made of.
        UnsupportedModel: as in `named_tensors`.
    """
    told = read_json(note)
    file = read_model(Path(str(told.get("file"))))
    if header_key(file) != told.get("header"):
        raise CheckpointError(f"{file.path} has changed since its settings were read; open it again")
    return named_tensors(file, lazily=lazily)


def named_tensors(file: GgufFile, *, lazily: bool = False) -> dict[str, StoredTensor]:
    """Returns the tensors of a model as a checkpoint of transformers has them, by their names there.

    Raises:
        CheckpointError: a tensor has not the rows of whole heads, or a part of one is missing.
        UnsupportedModel: transformers' model has no such tensor.
    """
    if file.settings.get("general.architecture") == WHISPER:
        return {whisper_name(file, name): _flat_bias(GgufTensor.placed(name, at)) for name, at in file.tensors.items()}
    if (speech := speech_of(file)) is not None:
        names = {name: speech_name(file, speech, name) for name in file.tensors}
        placed = {own: GgufTensor.placed(name, file.tensors[name], lazily=lazily) for name, own in names.items() if own}
        return {own: _of_speech(own, one) for own, one in placed.items()}
    delta = delta_heads(file)
    kind, found, joined = architecture_of(file), dict[str, StoredTensor](), dict[str, dict[int, GgufTensor]]()
    for name, at in file.tensors.items():
        own, heads = name_of(file, name), heads_of(file, name)
        if own is None:
            continue
        tensor = _reshaped(GgufTensor.placed(name, at, lazily=lazily))
        if "moe_statics" in own:  # of ERNIE
            tensor = evolve(tensor, shape=(1, prod(tensor.shape)))
        if heads:
            tensor = _turned_back(tensor, heads)
        if own.endswith(("query_key_value.weight", "query_key_value.bias")):
            tensor = _headed(tensor, Told(file).whole("attention.head_count"))
        if delta is not None and delta.tiled:
            tensor = _untiled(tensor, delta)
        if kind.raised and own.endswith("norm.weight") and "linear_attn" not in own:
            tensor = evolve(tensor, change=_lowered)
        own, _, number = own.partition("@")
        several, count = own.split("|"), tensor.shape[0]
        shares = shares_of(file, len(several))
        share, odd = divmod(count, sum(shares))
        if number:
            joined.setdefault(own, {})[int(number)] = tensor
        elif "{}" in own:
            found |= {own.format(index): tensor.part(index) for index in range(count)}
        elif odd:
            raise CheckpointError(f"{file.path}: {name} has {count} rows for {own}; download it again")
        else:
            for one, rows, end in zip(several, shares, accumulate(shares), strict=True):
                shape = rows * share, *tensor.shape[1:]
                found[one] = tensor.cut((end - rows) * share * prod(tensor.shape[1:]), shape)
    together = None if delta is None else delta.together()
    found |= _listed(file)
    return found | {own: JoinedTensor.of(own, parts, together) for own, parts in joined.items()}


def _listed(file: GgufFile) -> Iterator[tuple[str, StoredTensor]]:
    """Yields the tensors of one number that are settings in the file: one for each layer."""
    kind, layers = architecture_of(file), Told(file).layers
    for setting, own in kind.listed.items():
        at, shape = file.settings.get(setting), (1,) if "alpha" in own else ()
        if not isinstance(at, Listed) or at.format != "f" or at.count != layers:
            raise CheckpointError(f"{file.path} has not {layers} numbers in {setting}; download it again")
        for layer in range(layers):
            name, begin = f"{kind.layers}.{layer}.{own}", at.begin + 4 * layer
            yield name, StoredTensor(path=file.path, name=setting, begin=begin, kind="F32", shape=shape)


def _flat_bias(tensor: GgufTensor) -> GgufTensor:
    """Returns a tensor of Whisper, whose biases of convolutions have a second dimension in the file."""
    return evolve(tensor, shape=(prod(tensor.shape),)) if tensor.name.endswith(".bias") else tensor


def _of_speech(own: str, tensor: GgufTensor) -> GgufTensor:
    """Returns a tensor as Moonshine has it: weights of norms without one more, and a number that is no row."""
    tensor = evolve(tensor, shape=()) if own.endswith(".log_k") else tensor
    return evolve(tensor, change=_lowered) if own.endswith(".gamma") else tensor


def _reshaped(tensor: GgufTensor) -> GgufTensor:
    """Returns a tensor with the dimensions that it has in transformers' model."""
    name, shape = tensor.name, tensor.shape
    if name.endswith(("shortconv.conv.weight", "ssm_conv1d.weight")) and len(shape) == 2:
        return evolve(tensor, shape=(shape[0], 1, shape[1]))
    if name.endswith("ffn_gate_inp_shexp.weight"):
        return evolve(tensor, shape=(1, shape[-1]))
    if name.endswith((".ssm_a", ".ssm_d", ".ssm_norm.weight")):
        tensor = evolve(tensor, shape=(prod(shape),))
    return evolve(tensor, change=_logarithm) if name.endswith(".ssm_a") else tensor


def _logarithm(values: Tensor) -> Tensor:
    return (-values).log()


def _lowered(values: Tensor) -> Tensor:
    return values - 1.0


def _turned_back(tensor: GgufTensor, heads: int) -> GgufTensor:
    """Returns queries or keys with the two halves of each head's rotary numbers one after the other, not in pairs."""
    rows = tensor.shape[0]
    if rows % (2 * heads):
        raise CheckpointError(f"{tensor.path}: {tensor.name} has {rows} rows for {heads} heads; download it again")
    return _moved(tensor, np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1))


def _headed(tensor: GgufTensor, heads: int) -> GgufTensor:
    """Returns queries, keys and values of a head one after the other."""
    rows = tensor.shape[0]
    if rows % (3 * heads):
        raise CheckpointError(f"{tensor.path}: {tensor.name} has {rows} rows for {heads} heads; download it again")
    return _moved(tensor, np.arange(rows).reshape(3, heads, -1).swapaxes(0, 1).reshape(-1))


def _moved(tensor: GgufTensor, order: np.ndarray[Any, Any]) -> GgufTensor:
    if len(tensor.shape) == 1:  # a bias: each number is a row
        tensor = evolve(tensor, width=1, row=tensor.row // tensor.shape[0])
    return evolve(tensor, order=order)


def _untiled(tensor: GgufTensor, heads: DeltaHeads) -> GgufTensor:
    """Returns a tensor with the heads of values that share a key one after the other, if it has such heads."""
    leaf, before = tensor.name.split(".")[2:3], 2 * heads.keys * heads.of_keys
    sizes = {"attn_qkv": (heads.of_values, before), "ssm_conv1d": (heads.of_values, before)}
    sizes |= {"attn_gate": (heads.of_values, 0)} | dict.fromkeys(("ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt"), (1, 0))
    order = heads.moved(*sizes[leaf[0]]) if leaf and leaf[0] in sizes else None
    columns = heads.moved(heads.of_values) if leaf == ["ssm_out"] else None
    found = tensor.shape[0] if order is not None else tensor.width
    wanted = next((one for one in (order, columns) if one is not None), None)
    if wanted is not None and len(wanted) != found:
        told = f"{tensor.name} has {found} rows or columns for heads of {len(wanted)}"
        raise CheckpointError(f"{tensor.path}: {told}; download it again")
    return evolve(tensor, columns=columns) if order is None else _moved(tensor, order)
