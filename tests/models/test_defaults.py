"""Nothing that the engine computes depends on torch's default dtype, which belongs to the program."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import triolet
from triolet.models.machine.defaults import OwnDefaults, defaults_of_a_step
from triolet.models.native.runner import _floats

DTYPES = (torch.bfloat16, torch.float16, torch.float64)
_INTS, _TRUTHS, _HALVES = torch.arange(1, 6), torch.tensor([True, False]), torch.ones(3, dtype=torch.float16)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(7)


CALLS: dict[str, Callable[[], Any]] = {
    "empty": lambda: torch.empty(3).fill_(0.1),
    "zeros": lambda: torch.zeros(2, 3),
    "ones in a shape": lambda: torch.ones((2, 3)),
    "full": lambda: torch.full((3,), 0.1),
    "full of whole numbers": lambda: torch.full((3,), 7),
    "tensor": lambda: torch.tensor([0.1, 0.2]),
    "one number": lambda: torch.tensor(0.1),
    "nested": lambda: torch.tensor([[0.1], [3]]),
    "whole numbers": lambda: torch.tensor([1, 2]),
    "of numpy": lambda: torch.tensor(np.array([0.1])),
    "of numpy's numbers": lambda: torch.tensor([np.float64(0.1)]),
    "nothing": lambda: torch.tensor([]),
    "as_tensor": lambda: torch.as_tensor([0.1]),
    "arange": lambda: torch.arange(0.0, 1.0, 0.3),
    "arange of whole numbers": lambda: torch.arange(4),
    "linspace": lambda: torch.linspace(0, 1, 7),
    "logspace": lambda: torch.logspace(0, 1, 7),
    "eye": lambda: torch.eye(2),
    "hann": lambda: torch.hann_window(9),
    "hamming": lambda: torch.hamming_window(9, periodic=False),
    "frequencies": lambda: torch.fft.rfftfreq(9, d=0.1),
    "quotient": lambda: _INTS / 3,
    "quotient of two": lambda: torch.div(_INTS, _INTS + 1),
    "reciprocal": lambda: 1.0 / _INTS,
    "rounded": lambda: torch.div(_INTS, 2, rounding_mode="floor"),
    "product": lambda: _INTS * 0.1,
    "sum": lambda: 0.1 + _INTS,
    "root": _INTS.sqrt,
    "power": lambda: 10000.0**_INTS,
    "sine": partial(torch.sin, _INTS),
    "truths": lambda: _TRUTHS * 0.1,
    "where": lambda: torch.where(_TRUTHS, 0.1, -torch.inf),
    "sigmoid": lambda: _INTS.float().sigmoid() + torch.sigmoid(_INTS),
    "asked by name": _INTS.double,
    "asked by dtype": lambda: _INTS.to(torch.float64) / 3,
    "asked of a maker": lambda: torch.zeros(2, dtype=torch.bfloat16),
    "halves": lambda: _HALVES * 0.1,
    "like halves": partial(torch.zeros_like, _HALVES),
    "new of halves": partial(_HALVES.new_full, (2,), 0.1),
    "halves and ints": lambda: _HALVES[:3] * _INTS[:3],
    "a layer": lambda: torch.nn.Linear(2, 2, bias=False).weight.detach().fill_(0.1),
    "a complex number": lambda: torch.tensor(1j),
    "complex numbers": lambda: torch.tensor([[0.1, 1j]]),
    "times a complex number": lambda: _INTS * 1j,
    "a transform": lambda: torch.fft.rfft(_INTS),
    "sizes of complex numbers": lambda: torch.tensor([3 + 4j], dtype=torch.complex128).abs(),
    "rand": lambda: torch.rand(3, generator=seeded()),
    "randn": lambda: torch.randn(2, 3, generator=seeded()),
    "normal": lambda: torch.normal(0.0, 1.0, (3,), generator=seeded()),
    "normal of tensors": lambda: torch.normal(torch.zeros(3).double(), 1.0, generator=seeded()),
    "randint": lambda: torch.randint(0, 9, (3,), generator=seeded()),
    "bernoulli": lambda: torch.bernoulli(torch.full((9,), 0.5), generator=seeded()),
    "a norm": lambda: torch.nn.LayerNorm(3).weight.detach() + 0.1,
}


def of(call: Callable[[], Any]) -> tuple[torch.dtype, Any]:
    made = call()
    return made.dtype, made.to(torch.complex128).tolist()


NOT_OF_HALVES = frozenset(
    {"a complex number", "complex numbers", "times a complex number", "a transform"}
)  # says torch
CASES = [
    pytest.param(call, dtype, id=f"{name}-{dtype}")
    for name, call in CALLS.items()
    for dtype in DTYPES
    if dtype == torch.float64 or name not in NOT_OF_HALVES
]


@pytest.mark.parametrize(("call", "dtype"), CASES)
def test_under_own_defaults_each_call_returns_what_it_returns_under_them(
    call: Callable[[], Any], dtype: torch.dtype
) -> None:
    expected = of(call)
    with default_dtype(dtype):
        foreign = of(call)
        with OwnDefaults():
            assert of(call) == expected
        with OwnDefaults(torch.float32), OwnDefaults(dtype):
            assert of(call) == foreign, "the innermost counts"
        with defaults_of_a_step():
            assert of(call) == expected
        assert of(call) == foreign, "only within the block"
    with OwnDefaults(dtype):
        assert of(call) == foreign


def test_weights_that_are_drawn_leave_the_random_state_as_it_is() -> None:
    before = torch.get_rng_state()
    with OwnDefaults():
        layers = torch.nn.LSTM(4, 4), torch.nn.Linear(4, 4), torch.nn.Embedding(4, 4), torch.nn.Conv1d(4, 4, 2)
        torch.nn.init.trunc_normal_(layers[1].weight)
        torch.nn.init.xavier_uniform_(layers[1].weight)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(weight.std() > 0 for layer in layers for weight in layer.parameters())


DRAWS: dict[str, Callable[[], torch.Tensor]] = {
    "rand": lambda: torch.rand(9),
    "randn": lambda: torch.randn(9, device=torch.device("cpu")),
    "rand_like": lambda: torch.rand_like(torch.zeros(9)),
    "randint": lambda: torch.randint(0, 9, (9,)),
    "randperm": lambda: torch.randperm(9),
    "normal": lambda: torch.normal(0.0, 1.0, (9,)),
    "normal of tensors": lambda: torch.normal(torch.zeros(9), torch.ones(9)),
    "bernoulli": lambda: torch.bernoulli(torch.full((9,), 0.5)),
    "a method": lambda: torch.full((9,), 0.5).bernoulli(),
    "multinomial": lambda: torch.multinomial(torch.ones(9), 5),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_functions_that_draw_leave_the_random_state_as_it_is_and_draw_once(draw: Callable[[], torch.Tensor]) -> None:
    before, drawn = torch.get_rng_state(), []
    for dtype in (torch.float32, torch.float64):
        with default_dtype(dtype), OwnDefaults():
            drawn.append([draw().tolist(), draw().tolist()])
    assert torch.equal(torch.get_rng_state(), before)
    assert drawn[0] == drawn[1], "what comes next is the same whatever the default dtype"
    with torch.device("meta"), OwnDefaults():
        assert torch.rand(3).is_meta
    with OwnDefaults(), torch.device("meta"):
        assert torch.rand(3).is_meta


@pytest.mark.parametrize(
    ("tensor", "told"),
    [
        (torch.zeros(4, dtype=torch.bfloat16), "float32, not torch.bfloat16"),
        (torch.zeros(4, dtype=torch.float64), "float32, not torch.float64"),
        (torch.zeros(4, 2)[:, 0], "value by value"),
        (torch.zeros(3), "3 numbers where the library needs 4"),
    ],
)
def test_no_address_of_a_tensor_that_the_library_would_misread_leaves_python(tensor: torch.Tensor, told: str) -> None:
    with pytest.raises(AssertionError, match=told):
        _floats(tensor, 4)


_MAKERS = frozenset({"empty", "zeros", "ones", "rand", "randn", "eye", "linspace", "logspace", "hann_window"})
_MAKERS |= frozenset({"hamming_window", "full", "empty_strided", "normal", "scalar_tensor", "Tensor", "FloatTensor"})


def test_each_buffer_names_its_dtype() -> None:
    """Tests with a foreign default dtype find tensors of given numbers that name none."""
    without = []
    root = Path(triolet.__file__).parents[2]
    for path in sorted(path for room in ("models", "api") for path in (root / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            is_torchs = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            is_nothing = ast.unparse(node) == "torch.empty(0)"  # in place of what is released
            if not is_torchs or node.func.attr not in _MAKERS or is_nothing:
                continue
            if not any(keyword.arg in ("dtype", "out", None) for keyword in node.keywords):
                without.append(f"{path.relative_to(root)}:{node.lineno}: {ast.unparse(node)}")
    assert without == []
