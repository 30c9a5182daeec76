"""Devices and dtypes by the names that users give them."""

from __future__ import annotations

import torch

from ...core.errors import InvalidRequest

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def find_device(name: str) -> torch.device:
    """Returns the device ``name``, as `EngineConfig` allows it. Raises `InvalidRequest` if there is no such device."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cpu"):
        return torch.device("cpu")  # "cpu:0" is the same device, but not equal to "cpu"
    count = torch.cuda.device_count()
    if int(name.partition(":")[2] or 0) >= count:
        raise InvalidRequest(f"device={name!r}, but torch finds {count} CUDA devices; use device='auto' or 'cpu'")
    return torch.device(name)


def find_dtype(name: str, device: torch.device, *, int8: bool = False) -> torch.dtype:
    """Returns the dtype that a model computes in.

    Args:
        int8: true if the model's matrices are quantized. Results are then not exact in any dtype.
    """
    if name == "auto" and int8:
        return torch.bfloat16 if computes_in_bfloat16() else torch.float32
    if name == "auto":
        return torch.float16 if device.type == "cuda" else torch.float32
    return _DTYPES[name]


def find_kv_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which keys and values are held, for a model that computes in ``dtype``."""
    return dtype if name == "auto" else _DTYPES[name]


def computes_in_bfloat16() -> bool:
    """True if this CPU has instructions for products in bfloat16. Without them bfloat16 is slower than float32."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
