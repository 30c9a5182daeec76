"""Linear layers as torch computes them: the product of what is held, however many rows there are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from triolet.models.linear.modules import QuantizedEmbedding, QuantizedLinear, multiplies_int8, quantize
from triolet.models.native.parts import packed

SIZES = st.sampled_from([(1, 1), (7, 16), (128, 32), (300, 48), (512, 64)])
ROWS = st.integers(0, 40)


def float_linear(outputs, inputs, *, bias=True, dtype=torch.float32, seed=0):
    make = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=make).to(dtype)
    made = torch.nn.Linear(inputs, outputs, bias=bias).requires_grad_(False)
    made.weight.data = weight
    if bias:
        made.bias.data = torch.randn(outputs, generator=make).to(dtype)
    return made


def int8_linear(linear, dtype=torch.float32):
    weight, scales = quantize(linear.weight, dtype)
    return QuantizedLinear(weight, scales, None if linear.bias is None else linear.bias.to(dtype))


def inputs_for(linear, rows, seed=1):
    return torch.randn(rows, linear.weight.shape[1], generator=torch.Generator().manual_seed(seed))


def dequantized(linear):
    return linear.weight.float() * linear.scales.float()[:, None]


def expected(inputs, weight, bias):
    exact = inputs.double() @ weight.double().T
    return exact if bias is None else exact + bias.double()


@given(size=SIZES, rows=ROWS, bias=st.booleans(), panels=st.booleans())
def test_the_product_is_computed(size, rows, bias, panels):
    linear = float_linear(*size, bias=bias)
    inputs = inputs_for(linear, rows)
    found = (packed([linear], int8=False)[0] if panels else linear)(inputs)
    torch.testing.assert_close(found.double(), expected(inputs, linear.weight, linear.bias), atol=1e-4, rtol=1e-4)


@given(size=SIZES, rows=ROWS, bias=st.booleans())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_product_of_what_int8_holds_is_computed(size, rows, bias, dtype):
    """Up to what the inputs lose, in int8 themselves or in bfloat16: a part of their largest value for each product."""
    linear = int8_linear(float_linear(*size, bias=bias), dtype)
    inputs = inputs_for(linear, rows).to(dtype)
    found = linear(inputs).double()
    exact = expected(inputs.float(), dequantized(linear), linear.bias)
    lost = 2**-6 if dtype == torch.bfloat16 or multiplies_int8() else 1e-5
    bound = lost * inputs.double().abs().amax(1, keepdim=True) * dequantized(linear).double().abs().sum(1)
    assert ((found - exact).abs() <= bound + lost * exact.abs() + 1e-4).all()


@given(size=SIZES, rows=st.integers(2, 12), scale=st.floats(1e-3, 1e3))
def test_int8_inputs_of_a_row_do_not_depend_on_its_batch(size, rows, scale):
    """As loud neighbours would spoil them, were all rows quantized by the largest value of all."""
    linear = int8_linear(float_linear(*size))
    inputs = inputs_for(linear, rows)
    inputs[1:] *= scale
    together, alone = linear._of_quantized(inputs)[:1], linear._of_quantized(inputs[:1])
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("compute", [QuantizedLinear.forward, QuantizedLinear._of_exact, QuantizedLinear._of_quantized])
def test_a_row_of_zeros_gives_the_bias(compute):
    linear = int8_linear(float_linear(16, 8))
    torch.testing.assert_close(compute(linear, torch.zeros(1, 8))[0], linear.bias)


@given(size=SIZES, dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_a_quantized_weight_is_at_most_half_a_step_away(size, dtype):
    """The step is the scale as it is stored; bfloat16 may store one that is a little too small for the largest."""
    weight = float_linear(*size).weight
    found, scales = quantize(weight, dtype)
    apart = (found.float() * scales.float()[:, None] - weight).abs()
    most = 0.5 if dtype == torch.float32 else 0.5 + 127 * 2**-8
    assert (apart <= most * scales.float()[:, None] * 1.001).all()


def test_a_head_is_the_embedding_too():
    quantized, indices = int8_linear(float_linear(12, 8, bias=False)), torch.tensor([3, 0, 3])
    embedded = QuantizedEmbedding(quantized.weight, quantized.scales)(indices)
    assert torch.equal(embedded, dequantized(quantized)[indices])
