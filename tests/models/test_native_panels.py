"""Matrices as the native library holds them: exactly, or in int8 within half of a step."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from triolet.models.native.library import Library
from triolet.models.native.panels import GROUP, PANEL, Panels

pytestmark = pytest.mark.skipif(Library.load() is None, reason="installed without a compiler")


@given(
    outputs=st.integers(1, 70),
    inputs=st.integers(1, 40),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_panels_hold_the_matrix_exactly(outputs: int, inputs: int, dtype: torch.dtype, seed: int) -> None:
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)).to(dtype).float()
    packed = Panels.of(weight)
    assert torch.finfo(packed.packed.dtype).bits <= torch.finfo(dtype).bits
    assert torch.equal(packed.part(0, outputs), weight)
    assert torch.equal(packed.part(outputs // 3, outputs), weight[outputs // 3 :])
    places = torch.arange(outputs).flip(0)
    assert torch.equal(packed.rows(places), weight[places])
    pairs = Panels.of(weight.bfloat16())
    assert torch.equal(pairs.rows(places), weight.bfloat16().float()[places])


@given(
    outputs=st.integers(1, 70),
    inputs=st.integers(1, 150),
    power=st.sampled_from([-60, -22, -9, 0, 40]),
    uneven=st.booleans(),
    seed=st.integers(0, 99),
)
def test_panels_hold_the_matrix_in_int8(outputs: int, inputs: int, power: int, uneven: bool, seed: int) -> None:
    """Within half of a step of each group's scale, even if float16 holds few of the scales well."""
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)) * 2.0**power
    weight[outputs // 2] *= 1e-4 if uneven else 1.0
    weight[outputs // 3] = 0.0
    packed = Panels.of(weight, dtype=torch.int8)
    slack = 2.0**-25 if packed.packed.shape[-1] == PANEL * (2 + GROUP) else 0.0  # of a scale that is rounded
    held = packed.part(0, outputs)
    assert held.shape == weight.shape
    for start in range(0, inputs, GROUP):
        own, kept = weight[:, start : start + GROUP], held[:, start : start + GROUP]
        step = own.abs().amax(1, keepdim=True) / 127
        assert bool(((own - kept).abs() <= step * 0.501 + slack).all())
    places = torch.arange(outputs).flip(0)
    assert torch.equal(packed.rows(places), held[places])


@pytest.mark.parametrize("place", [128.0, 128.49, 128.5, 128.51, 129.5, 200.4999])
def test_the_largest_value_stays_it_where_float16_is_coarse(place: float) -> None:
    """Its scale is rounded up: 128 would be -128."""
    row = torch.linspace(-1.0, 1.0, GROUP)[None] * (127.0 * place * 2.0**-24)
    packed = Panels.of(row, dtype=torch.int8)
    assert packed.packed.shape[-1] == PANEL * (2 + GROUP)
    torch.testing.assert_close(packed.part(0, 1), row, rtol=0.0, atol=0.501 * math.ceil(place) * 2.0**-24)


@pytest.mark.parametrize(("factor", "of_scale"), [(1.0, 2), (0.0, 2), (1e-3, 4), (float("nan"), 4)])
def test_experts_of_unequal_size_have_one_format(factor: float, of_scale: int) -> None:
    weights = torch.randn(3, 40, 64, generator=torch.Generator().manual_seed(1)) * 0.02
    weights[1] *= factor
    packed = Panels.of_each(weights, dtype=torch.int8)
    assert packed.packed.shape == (6, 2, 32 * (of_scale + 32))
    for index, weight in enumerate(weights):
        held = packed.part(64 * index, 64 * index + 40)
        size = factor if index == 1 and not math.isnan(factor) else 1.0
        torch.testing.assert_close(held, weight, rtol=0.0, atol=4e-4 * size, equal_nan=True)


@pytest.mark.parametrize(("scale", "of_scale"), [(0.25, 2), (0.1, 4)])
def test_scales_of_a_checkpoint_are_held_exactly(scale: float, of_scale: int) -> None:
    values = torch.randint(-127, 128, (40, 70), generator=torch.Generator().manual_seed(1)).to(torch.int8)
    packed = Panels.of_int8(values, torch.full((40, 1), scale))
    assert packed.packed.shape == (2, 3, 32 * (of_scale + 32))
    assert torch.equal(packed.part(0, 40), values * torch.tensor(scale))
