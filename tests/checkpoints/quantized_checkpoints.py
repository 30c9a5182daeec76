"""Tiny checkpoints in the published layouts of quantized weights, and the weights that they stand for.

The writers follow the layouts as their projects document them, number by number, and share nothing with the readers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .checkpoints import classes, random_model, rewrite, save_checkpoint, text_settings
from .words import LLAMA

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column of each four bits of an integer, from the lowest on."""
Write = Callable[[np.ndarray[Any, Any], np.random.Generator], tuple[Mapping[str, Any], np.ndarray[Any, Any]]]


def make_wide(folder: Path, name: str = "Llama", **changes: Any) -> Path:
    """Writes a model of transformers' class ``name`` whose matrices have rows of 128 and 256 numbers."""
    tokenizer, made = LLAMA.make(), classes()
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 32}
    config = getattr(made, f"{name}Config")(**text_settings(tokenizer) | sizes | changes)
    save_checkpoint(folder, random_model(getattr(made, f"{name}ForCausalLM"), config, 0), tokenizer)
    return folder


def quantize(folder: Path, target: Path, told: Mapping[str, Any], write: Write) -> tuple[Path, Path]:
    """Writes two checkpoints into ``target``: one whose linear layers ``write`` quantizes, and one with the weights
    that these stand for."""
    stored, plain = dict[str, Tensor](), dict[str, Tensor]()
    dice = np.random.default_rng(7)
    for name, weight in load_file(folder / "model.safetensors").items():
        if "_proj.weight" not in name:
            stored[name] = plain[name] = weight
            continue
        parts, weights = write(weight.double().numpy(), dice)
        layer = name.removesuffix(".weight")
        made = {
            end: one if isinstance(one, Tensor) else torch.from_numpy(np.ascontiguousarray(one))
            for end, one in parts.items()
        }
        stored |= {f"{layer}.{end}": one for end, one in made.items()}
        plain[name] = torch.from_numpy(weights.astype(np.float32))
    for place, found in (("quantized", stored), ("plain", plain)):
        shutil.copytree(folder, target / place)
        save_file(found, target / place / "model.safetensors", metadata={"format": "pt"})
    rewrite(target / "quantized" / "config.json", quantization_config=dict(told))
    return target / "quantized", target / "plain"


def _rounded(weight: Any, groups: Any, bits: int, symmetric: bool) -> tuple[Any, Any, Any]:
    """Numbers [outputs, inputs], float16 scales and zeros [outputs, groups]."""
    count, most = groups.max() + 1, 2**bits - 1
    scales, zeros = np.empty((len(weight), count), np.float16), np.empty((len(weight), count), np.int64)
    for group in range(count):
        own = weight[:, groups == group]
        low, high = own.min(1).clip(max=0), own.max(1).clip(min=0)
        if symmetric:
            high = np.maximum(-low, high)
            low = -high
        scales[:, group] = (high - low) / most
        zeros[:, group] = (most + 1) // 2 if symmetric else np.round(-low / scales[:, group])
    numbers = np.round(weight / scales[:, groups] + zeros[:, groups]).clip(0, most).astype(np.int64)
    return numbers, scales, zeros


def _meaning(numbers: Any, scales: Any, zeros: Any, groups: Any) -> Any:
    """What the numbers stand for, in float32, which holds each exactly."""
    return (numbers - zeros[:, groups]).astype(np.float32) * scales.astype(np.float32)[:, groups]


def _joined(numbers: Any, bits: int) -> Any:
    """Joins numbers along the last dimension in integers of 32 bits, the first in the lowest bits."""
    each = 32 // bits
    found = np.zeros((*numbers.shape[:-1], numbers.shape[-1] // each), np.int64)
    for place in range(each):
        found |= numbers[..., place::each] << (bits * place)
    return found.astype(np.uint32).view(np.int32)


def gptq(
    *, bits: int = 4, group: int = 32, symmetric: bool = False, ordered: bool = False, second: bool = False
) -> Any:
    """GPTQ's: integers hold inputs, zeros are one less unless it is the ``second`` format, and inputs may be
    ``ordered`` by importance before they are grouped."""

    def write(weight: Any, dice: Any) -> Any:
        groups = np.arange(weight.shape[1]) // group
        if ordered:
            groups = groups[np.random.default_rng(weight.shape[1]).permutation(weight.shape[1])]
        numbers, scales, zeros = _rounded(weight, groups, bits, symmetric)
        zeros = zeros.clip(1) if not second else zeros  # the first format has none for zero
        packed = {
            "qweight": _joined(numbers, bits).T,
            "qzeros": _joined(zeros.T if second else zeros.T - 1, bits),
            "scales": scales.T,
            "g_idx": groups.astype(np.int32),
        }
        packed["qweight"] = _joined(numbers, bits).T
        return packed, _meaning(numbers, scales, zeros, groups)

    told = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": ordered}
    return told | {"checkpoint_format": "gptq_v2" if second else "gptq"}, write


def awq(*, group: int = 32) -> Any:
    """AWQ's of the kind GEMM: integers hold outputs, in an order of their own."""

    def write(weight: Any, dice: Any) -> Any:
        groups = np.arange(weight.shape[1]) // group
        numbers, scales, zeros = _rounded(weight, groups, 4, False)

        def turned(matrix: Any) -> Any:  # [inputs or groups, outputs]
            eights = matrix.reshape(len(matrix), -1, 8)[..., AWQ_ORDER]
            return _joined(eights.reshape(len(matrix), -1), 4)

        packed = {"qweight": turned(numbers.T), "qzeros": turned(zeros.T), "scales": scales.T}
        return packed, _meaning(numbers, scales, zeros, groups)

    return {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}, write


def compressed(*, bits: int = 4, group: int | None = 32, symmetric: bool = True, ordered: bool = False) -> Any:
    """Compressed-tensors' of the kind pack-quantized: integers hold inputs, zeros are packed along the outputs."""

    def write(weight: Any, dice: Any) -> Any:
        groups = np.arange(weight.shape[1]) // (group or weight.shape[1])
        groups = groups[np.random.default_rng(weight.shape[1]).permutation(weight.shape[1])] if ordered else groups
        numbers, scales, zeros = _rounded(weight, groups, bits, symmetric)
        packed = {
            "weight_packed": _joined(numbers, bits),
            "weight_scale": scales,
            "weight_shape": np.array(weight.shape),
        }
        packed |= {} if symmetric else {"weight_zero_point": _joined(zeros.T, bits).T}
        packed |= {"weight_g_idx": groups.astype(np.int32)} if ordered else {}
        return packed, _meaning(numbers, scales, zeros, groups)

    kind = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group" if group else "channel"}
    scheme = {"targets": ["Linear"], "weights": kind | {"group_size": group, "actorder": "group" if ordered else None}}
    form = {"format": "pack-quantized", "quantization_status": "compressed", "ignore": ["lm_head"]}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": scheme}, **form}, write


def fp8(*, block: int | None = 64) -> Any:
    """FP8 with a scale for each ``block`` of rows and columns, or one for all."""

    def write(weight: Any, dice: Any) -> Any:
        rows, size = weight.shape, block or max(weight.shape)
        grid = [-(-every // size) for every in rows]
        scales = dice.uniform(0.001, 0.01, grid).astype(np.float32)
        every = np.repeat(np.repeat(scales, size, 0), size, 1)[: rows[0], : rows[1]]
        values = torch.from_numpy(weight / every).clamp(-440, 440).to(torch.float8_e4m3fn)
        told = scales if block else scales.reshape(())
        return {"weight": values, "weight_scale_inv": told}, values.float().numpy() * every

    blocks = [block, block] if block else None
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": blocks}, write


NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def nf4(*, nested: bool = True) -> Any:
    """The four bits of bitsandbytes, two in a byte, the first in the higher ones."""

    def write(weight: Any, dice: Any) -> Any:
        places = dice.integers(0, 16, weight.size)
        count, table = weight.size // 64, np.array(NF4, np.float32)
        largest = dice.uniform(0.01, 0.05, count).astype(np.float32)
        state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
        parts: dict[str, Any] = {"weight.absmax": largest}
        if nested:
            codes, of_codes = dice.integers(0, 256, count).astype(np.uint8), np.linspace(-1, 1, 256).astype(np.float32)
            of_blocks = dice.uniform(0.001, 0.005, -(-count // 256)).astype(np.float32)
            largest = of_codes[codes] * np.repeat(of_blocks, 256)[:count] + np.float32(0.02)
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(np.float32(0.02))}
            parts = {"weight.absmax": codes, "weight.nested_absmax": of_blocks, "weight.nested_quant_map": of_codes}
        told = np.frombuffer(json.dumps(state).encode(), np.uint8).copy()
        packed = ((places[::2] << 4) | places[1::2]).astype(np.uint8)[:, None]
        parts |= {"weight": packed, "weight.quant_map": table, "weight.quant_state.bitsandbytes__nf4": told}
        return parts, (table[places] * np.repeat(largest, 64)).reshape(weight.shape)

    return {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, write


def of_bytes() -> Any:
    """The int8 of bitsandbytes."""

    def write(weight: Any, dice: Any) -> Any:
        most = np.abs(weight).max(1).astype(np.float32)
        numbers = np.round(weight / most[:, None] * 127).astype(np.int8)
        parts = {"weight": numbers, "SCB": most, "weight_format": np.array(0, np.uint8)}
        return parts, numbers.astype(np.float32) * (most / np.float32(127))[:, None]

    return {"quant_method": "bitsandbytes", "load_in_8bit": True}, write


def unpacked(kind: str, blocks: Tensor, inputs: int) -> Tensor:
    """The weights of blocks as the native library's header says, float32 [rows, inputs]."""
    size = 128 if kind == "INT4_128" else 32
    raw = blocks.numpy().reshape(len(blocks), inputs // size, -1)
    if kind == "Q8_0":
        found = raw[..., :2].copy().view(np.float16).astype(np.float32) * raw[..., 2:].view(np.int8)
    else:
        pairs = raw[..., 8:].reshape(*raw.shape[:2], -1, 16)
        numbers = np.stack([pairs & 15, pairs >> 4], -2).reshape(*raw.shape[:2], size).astype(np.float32)
        found = raw[..., :4].copy().view(np.float32) * (numbers - raw[..., 4:5])
    return torch.from_numpy(found.reshape(len(blocks), inputs).astype(np.float32))
