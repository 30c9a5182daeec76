"""Matrices that become 4 bits when they are packed: `EngineConfig.quantization` is ``"int4"``.

Each 32 inputs of an output have numbers from 0 to 15, a scale and the value of 0, both in float16: blocks of the kind
Q4_1 of ggml, of 5 bits for a weight. Several spreads of the numbers are tried for each block. For each the scale and
the value that fit best are computed by least squares, and those with the smallest error are used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn

from ..checkpoints.unread import UnreadTensor, derived

_GROUP = 32  # inputs of a block
_MOST = 15
_TRIED = (-1.0, 0.0, 1.0, 2.0)  # numbers more than 15 that a block's values are spread over
_PIECE = 4096  # blocks that are made at a time, so that they stay in the processor's cache
_TINY = 1e-30
_IN_8_BITS = re.compile(  # some names are those of NeMo's files
    r"(^|\.)(v_proj|v|value_net|linear_v|(encoder_attn|EncDecAttention|second_sub_layer)\.(k_proj|k|key_net)"
    r"|subsampling\.linear|pre_encode\.out)$"
)


def kind_of(name: str, shape: tuple[int, ...]) -> str | None:
    """Returns the kind of blocks for the matrix of the linear layer ``name``; ``None``: it does not become blocks.
    Values of attention have 8 bits: they are few, and what they lose costs more than in other layers. So have the keys
    of encoder outputs, which are one matrix with their values, what reads convolutions over spectra, and layers of few
    outputs, since others that are one matrix with them could not be blocks. What weighs a shared expert stays exact."""
    if len(shape) != 2 or shape[1] % _GROUP or name.endswith("shared_expert_gate"):
        return None
    return "Q8_0" if shape[0] < _GROUP or _IN_8_BITS.search(name) else "Q4_1"


@frozen(eq=False)
class Rounded:
    """The source of an `UnreadTensor` whose blocks are made of a plain ``weight``, row by row. Where blocks cannot be
    packed the weight is used as it is."""

    weight: Tensor
    block_kind: str

    has_parts = False
    input_order = None

    def read(self, dtype: torch.dtype) -> Tensor:
        """Returns the weight before it is rounded."""
        return self._rows(0, len(self.weight)).to(dtype)

    def blocks(self, start: int, stop: int) -> Tensor:
        """Returns the blocks of some rows, as uint8 [rows, bytes of a row]."""
        rows = self._rows(start, stop).float()
        make = int8_blocks if self.block_kind == "Q8_0" else int4_blocks
        return torch.cat([make(part) for part in torch.split(rows.reshape(-1, _GROUP), _PIECE)]).view(len(rows), -1)

    def sample(self) -> Iterator[Tensor]:
        """Yields nothing: a fingerprint is taken before weights are rounded."""
        yield from ()

    def _rows(self, start: int, stop: int) -> Tensor:
        if isinstance(self.weight, UnreadTensor):
            return self.weight.read_rows(start, stop)
        return self.weight[start:stop].contiguous()


def int4_blocks(values: Tensor) -> Tensor:
    """Returns blocks of the kind Q4_1, uint8 [blocks, 20], for ``values`` [blocks, 32]."""
    low, high = values.aminmax(dim=1, keepdim=True)
    span, total = (high - low).clamp_(min=_TINY), values.sum(1).double()
    best = [torch.full_like(total, torch.inf), torch.zeros_like(span), total, total]
    for more in _TRIED:
        steps = (_MOST + more) / span
        numbers = _numbers(values, low, steps)
        count, squares = numbers.sum(1).double(), torch.linalg.vecdot(numbers, numbers).double()
        products = torch.linalg.vecdot(numbers, values).double()
        spread = _GROUP * squares - count * count
        scale = torch.where(spread > 0, (_GROUP * products - count * total) / spread.clamp(min=1), 0).half().double()
        least = ((total - scale * count) / _GROUP).half().double()
        # the squared error, but for the sum of the squared values, which is the same for each scale
        error = scale * (scale * squares + 2 * (least * count - products)) + least * (_GROUP * least - 2 * total)
        found = (error, steps, scale, least)
        better = error < best[0]
        best = [torch.where(better.view_as(new), new, old) for new, old in zip(found, best, strict=True)]
    halves = _numbers(values, low, best[1]).to(torch.uint8).view(-1, 2, 16)
    told = torch.stack([best[2], best[3]], 1).half().view(torch.uint8)
    return torch.cat([told, halves[:, 0] | halves[:, 1] << 4], 1)


def _numbers(values: Tensor, low: Tensor, steps: Tensor) -> Tensor:
    return (values - low).mul_(steps).round_().clamp_(0, _MOST)


def int8_blocks(values: Tensor) -> Tensor:
    """Returns blocks of the kind Q8_0, uint8 [blocks, 34], for ``values`` [blocks, 32]."""
    scales = (values.abs().amax(1, keepdim=True) / 127).half()
    numbers = (values / scales.float().clamp(min=_TINY)).round_().clamp_(-127, 127).to(torch.int8)
    return torch.cat([scales.view(torch.uint8), numbers.view(torch.uint8)], 1)


def round_matrices(module: nn.Module) -> None:
    """Makes the matrices of plain linear layers in ``module`` blocks of 4 or 8 bits once they are packed. A head, and a
    matrix that another module shares, stay as they are."""
    head: Any = getattr(module, "get_output_embeddings", lambda: None)()
    shared = {id(each.weight) for each in module.modules() if isinstance(each, nn.Embedding)}
    for name, each in module.named_modules():
        weight: Any = getattr(each, "weight", None)
        turned = type(each).__name__ == "Conv1D"  # of GPT-2, whose inputs are rows
        if not (type(each) is nn.Linear or turned) or each is head or id(weight) in shared:
            continue
        rows = derived(weight.detach(), torch.t) if turned else weight.detach()
        kind = kind_of(name, tuple(rows.shape))
        if kind is None or getattr(weight, "block_kind", None) is not None:
            continue
        made: Any = UnreadTensor(rows.shape, rows.dtype, Rounded(rows, kind))
        each.weight = nn.Parameter(derived(made, torch.t) if turned else made, requires_grad=False)
