"""Quantizes matrices to int8 while they are read: each row symmetrically, by its largest value (Jacob et al. 2018,
"Quantization and training of neural networks for efficient integer-arithmetic-only inference", section 2.1, with a zero
point of 0)."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing

import torch
from torch import Tensor


def quantize(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns ``weight`` [outputs, inputs] in int8, and the scales [outputs] in ``dtype``. Each output is quantized
    symmetrically, by its largest value. Values are divided by the scale as it is stored, in ``dtype``, and then
    rounded."""
    wide = weight.float()
    scales = (wide.abs().amax(1) / 127.0).clamp_(min=torch.finfo(dtype).tiny).to(dtype)
    return (wide / scales.float()[:, None]).round_().clamp_(-127, 127).to(torch.int8), scales


def fill_quantized(weight: Tensor, scales: Tensor, pieces: Generator[Tensor, None, None], scale: float = 1.0) -> None:
    """Multiplies all values by ``scale`` and quantizes them into ``weight`` (int8 [outputs, inputs]) and ``scales``
    (see `quantize`). Works on a few rows at a time, so that the whole matrix is never in memory unquantized. Closes
    ``pieces`` in every case.
    """
    width, row = weight.shape[1], 0
    left = torch.empty(0, dtype=torch.float32)
    with closing(pieces):
        for piece in pieces:
            values = torch.cat([left, piece.float() * scale])
            whole = len(values) // width
            rows = slice(row, row + whole)
            weight[rows], scales[rows] = quantize(values[: whole * width].view(whole, width), scales.dtype)
            left, row = values[whole * width :].clone(), row + whole
