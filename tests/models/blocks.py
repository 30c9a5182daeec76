"""Made-up quantized blocks of ggml's kinds, and what the package `gguf` makes of them."""

from __future__ import annotations

import gguf
import numpy as np
import torch
from attrs import frozen
from torch import Tensor

INT4 = {"INT4_32": 32, "INT4_128": 128}
"""Inputs of a block of numbers of 4 bits that `gguf` does not have."""
KINDS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4", *INT4)
# Where a block has numbers in float16, which must be of some size; the others are any bytes.
_HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "MXFP4": ()}


@frozen
class Blocks:
    """A matrix [outputs, inputs] of blocks, as a tensor of a file is that the library packs."""

    block_kind: str
    bytes: Tensor
    inputs: int
    input_order: Tensor | None = None

    @classmethod
    def random(cls, kind: str, outputs: int, inputs: int, seed: int = 0) -> Blocks:
        """Any numbers, with scales between -0.05 and 0.05."""
        if kind in INT4:
            count, size = INT4[kind], 8 + INT4[kind] // 2
        else:
            count, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        dice = np.random.default_rng(seed)
        raw = dice.integers(0, 256, (outputs, inputs // count, size), dtype=np.uint8)
        for at in () if kind in INT4 else _HALVES.get(kind, (0,)):
            scales = dice.uniform(-0.05, 0.05, raw.shape[:2]).astype(np.float16)
            raw[..., at : at + 2] = scales[..., None].view(np.uint8)
        if kind == "MXFP4":
            raw[..., 0] = dice.integers(118, 124, raw.shape[:2])
        if kind in INT4:
            raw[..., :4] = dice.uniform(-0.05, 0.05, raw.shape[:2]).astype(np.float32)[..., None].view(np.uint8)
            raw[..., 4] %= 16
        return cls(kind, torch.from_numpy(raw.reshape(outputs, -1)), inputs)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.bytes), self.inputs

    def __len__(self) -> int:
        return len(self.bytes)

    def blocks_of(self, start: int, stop: int) -> Tensor:
        return self.bytes[start:stop]

    def weights(self) -> Tensor:
        """What `gguf` makes of them, float32, or the difference of each number and the zero, by the scale."""
        if self.block_kind in INT4:
            blocks = self.bytes.view(len(self), -1, 8 + INT4[self.block_kind] // 2)
            scales, zeros = blocks[..., :4].contiguous().view(torch.float32), blocks[..., 4:5].float()
            pairs = blocks[..., 8:].unflatten(-1, (-1, 16))
            numbers = torch.stack([pairs & 15, pairs >> 4], -2).flatten(2).float()
            weights = (scales * (numbers - zeros)).flatten(1)
            return weights if self.input_order is None else weights[:, self.input_order.argsort()]
        kind = gguf.GGMLQuantizationType[self.block_kind]
        return torch.from_numpy(gguf.quants.dequantize(self.bytes.numpy(), kind))
