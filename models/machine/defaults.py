"""The default dtype and the random state of torch belong to the whole process. `OwnDefaults` makes them a thread's own.

A program may set another default dtype, and transformers does so while it makes a module. Our own code names the dtype
of each tensor that it makes. Code of transformers does not. Where it makes modules, features or encoder outputs for us,
it runs under `OwnDefaults`, which no other thread notices.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

OURS = torch.float32
"""The default dtype that our own code and transformers' rely on."""

_CASTS = frozenset({"float", "double", "half", "bfloat16", "type"})  # their names or texts say which dtype
_OF_DEFAULT = frozenset({"rand", "randn", "normal"})  # draws of the default dtype, unless they are made of tensors
_DRAWS = frozenset({"normal_", "uniform_", "trunc_normal_", "kaiming_uniform_", "random_", "bernoulli_"})
_FILLS = _DRAWS | frozenset({"constant_", "ones_", "zeros_", "fill_", "zero_"})
_DRAWS |= _OF_DEFAULT | {"randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli", "multinomial"}
_innermost = threading.local()


class OwnDefaults(TorchFunctionMode):
    """Gives the thread that enters it a default dtype and a random state of its own, until it leaves. Each call of
    torch returns what it returns under ``dtype``, whatever the default dtype of the process is, and whenever another
    thread changes it. What is drawn at random on the CPU leaves the random state of the process as it is: weights, and
    tensors of the functions in ``_DRAWS``. Weights that transformers has loaded are not filled again, nor those
    without memory, for which torch would take its time.

    A call of torch takes a few microseconds longer. Of blocks within blocks the innermost counts. Not covered are the
    classes, as in ``torch.Tensor([0.1])``, `torch.get_default_dtype`, dropout in training and what else functions of
    Python within torch draw or make, other draws (``poisson``, ``exponential_``), and those on a GPU. Where the default
    dtype of the process is a half, torch refuses new complex numbers and transforms of whole numbers here, too.
    """

    def __init__(self, dtype: torch.dtype = OURS) -> None:
        super().__init__()
        self.dtype = dtype
        self._generator: torch.Generator | None = None

    def __enter__(self) -> Self:
        self._around, _innermost.mode = getattr(_innermost, "mode", None), self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _innermost.mode = self._around

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        told, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if _innermost.mode is not self:
            return func(*args, **told)
        if name in _FILLS:
            target = args[0] if args else told["tensor"]
            if getattr(target, "_is_hf_initialized", False) or target.is_meta:
                return target
        if name in _DRAWS:
            first = next((one for one in (*args, *told.values()) if isinstance(one, Tensor)), None)
            if told.get("generator") is None and _is_on_cpu(told.get("device") if first is None else first.device):
                self._generator = self._generator or torch.Generator().manual_seed(0)
                told["generator"] = self._generator
            if first is None and name in _OF_DEFAULT and told.get("dtype") is None:
                told["dtype"] = self.dtype  # a second call would draw again
        made = func(*args, **told)
        if not isinstance(made, Tensor) or made.dtype == self.dtype or not _is_inexact(made) or name in _CASTS:
            return made
        given = tree_leaves((args, told))
        tensors = [one for one in given if isinstance(one, Tensor)]
        if any(map(_is_inexact, tensors)) or any(map(_names_a_dtype, given)):
            return made  # the dtype is that of the inputs, or asked for
        if not tensors:
            return func(*args, **{**told, "dtype": self.dtype.to_complex() if made.is_complex() else self.dtype})
        kind = float if name == "where" else Tensor  # a condition stays one
        args, told = tree_map_only(kind, lambda one: torch.as_tensor(one, dtype=self.dtype), (args, told))
        return func(*args, **told)


def _is_inexact(one: Tensor) -> bool:
    return one.is_floating_point() or one.is_complex()


def _is_on_cpu(device: Any) -> bool:
    return torch.device(torch.get_default_device() if device is None else device).type == "cpu"


def _names_a_dtype(one: object) -> bool:
    """True for a dtype, and for arrays and numbers of numpy."""
    return isinstance(one, torch.dtype) or (not isinstance(one, Tensor) and hasattr(one, "dtype"))


def defaults_of_a_step() -> AbstractContextManager[object]:
    """Returns `OwnDefaults` if the process has another default dtype than ours. A step of a model that torch computes
    makes hundreds of calls. As far as it is known, none of them depends on the default dtype."""
    return nullcontext() if torch.get_default_dtype() == OURS else OwnDefaults()
