"""Linear layers: every kernel computes the same product, whatever is chosen; and the choice is by measurement."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from attrs import define, field
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from triolet.models.checkpoints.int8 import fill_quantized, quantize
from triolet.models.linear import layers
from triolet.models.linear.choice import ROWS, ChoiceFile, choose
from triolet.models.linear.kernels import FLOAT, INT8, WHOLE, multiplies_int8
from triolet.models.linear.layers import FloatLinear, Int8Linear, Kernels
from triolet.models.machine.cache import CacheFile

NOT_INT8 = {"weight_only", "dequantized"}
SIZES = st.sampled_from([(1, 1), (7, 16), (128, 32), (300, 48), (512, 64)])


def float_linear(outputs, inputs, *, bias=True, dtype=torch.float32, seed=0):
    make = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=make).to(dtype)
    return FloatLinear(weight, torch.randn(outputs, generator=make).to(dtype) if bias else None, Kernels())


def int8_linear(linear, dtype=torch.float32):
    weight, scales = quantize(linear.weight, dtype)
    bias = None if linear.bias is None else linear.bias.to(dtype)
    return Int8Linear(weight, scales, bias, Kernels())


def inputs_for(linear, rows, seed=1):
    return torch.randn(rows, linear.shape.inputs, generator=torch.Generator().manual_seed(seed))


def dequantized(linear):
    return linear.weight.float() * linear.scales.float()[:, None]


def expected(inputs, weight, bias):
    exact = inputs.double() @ weight.double().T
    return exact if bias is None else exact + bias.double()


@given(size=SIZES, rows=st.integers(1, 40), bias=st.booleans(), name=st.sampled_from(list(FLOAT)))
def test_every_kernel_computes_the_product(size, rows, bias, name):
    linear = float_linear(*size, bias=bias)
    inputs = inputs_for(linear, rows)
    found = linear.compute(name, inputs)
    assert found.is_contiguous()
    torch.testing.assert_close(found.double(), expected(inputs, linear.weight, linear.bias), atol=1e-4, rtol=1e-4)


@given(size=SIZES, rows=st.integers(1, 40), bias=st.booleans(), name=st.sampled_from(list(INT8)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_kernel_of_int8_computes_the_product_of_what_is_held(size, rows, bias, name, dtype):
    """Up to what the inputs lose, in int8 themselves or in bfloat16: a part of their largest value for each product."""
    linear = int8_linear(float_linear(*size, bias=bias), dtype)
    if (name == "weight_only" and size[1] % WHOLE) or (name == "int8" and not multiplies_int8()):
        reject()
    inputs = inputs_for(linear, rows).to(dtype)
    found = linear.compute(name, inputs).double()
    exact = expected(inputs.float(), dequantized(linear), linear.bias)
    lost = 2**-6 if dtype == torch.bfloat16 or name == "int8" else 1e-5
    bound = lost * inputs.double().abs().amax(1, keepdim=True) * dequantized(linear).double().abs().sum(1)
    assert ((found - exact).abs() <= bound + lost * exact.abs() + 1e-4).all()


@given(size=SIZES, rows=st.integers(2, 12), scale=st.floats(1e-3, 1e3))
def test_int8_inputs_of_a_row_do_not_depend_on_its_batch(size, rows, scale):
    """As loud neighbours would spoil them, were all rows quantized by the largest value of all."""
    linear = int8_linear(float_linear(*size))
    inputs = inputs_for(linear, rows)
    inputs[1:] *= scale
    together, alone = linear.compute("int8", inputs)[:1], linear.compute("int8", inputs[:1])
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=1e-6)


def test_a_row_of_zeros_gives_the_bias():
    linear = int8_linear(float_linear(16, 8))
    for name in linear.candidates:
        torch.testing.assert_close(linear.compute(name, torch.zeros(1, 8))[0], linear.bias)


@settings(max_examples=40)
@given(size=SIZES, piece=st.integers(1, 200), scale=st.sampled_from([1.0, 0.125]))
def test_quantizing_piece_by_piece_is_quantizing_the_whole(size, piece, scale):
    """Wherever the pieces end."""
    weight = float_linear(*size).weight
    flat = weight.flatten()
    pieces = (flat[start : start + piece] for start in range(0, len(flat), piece))
    found, scales = torch.empty(size, dtype=torch.int8), torch.empty(size[0])
    fill_quantized(found, scales, pieces, scale)
    whole = quantize(weight * scale, torch.float32)
    assert torch.equal(found, whole[0])
    assert torch.equal(scales, whole[1])


@given(size=SIZES, dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_a_quantized_weight_is_at_most_half_a_step_away(size, dtype):
    """The step is the scale as it is stored; bfloat16 may store one that is a little too small for the largest."""
    weight = float_linear(*size).weight
    found, scales = quantize(weight, dtype)
    apart = (found.float() * scales.float()[:, None] - weight).abs()
    most = 0.5 if dtype == torch.float32 else 0.5 + 127 * 2**-8
    assert (apart <= most * scales.float()[:, None] * 1.001).all()


def test_a_head_is_the_embedding_too():
    linear = float_linear(12, 8, bias=False)
    indices = torch.tensor([3, 0, 3])
    assert torch.equal(linear.rows(indices), linear.weight[indices])
    quantized = int8_linear(linear)
    assert torch.equal(quantized.rows(indices), dequantized(quantized)[indices])


def test_rows_may_be_none_and_lie_apart():
    """As those of an expert that no token chose, and those cut out of others."""
    linear = float_linear(300, 32)
    apart = inputs_for(float_linear(1, 64), 6).T[:32].T[::2]
    for name in FLOAT:
        linear.kernels.chosen[linear.shape] = ((1, name),)
        torch.testing.assert_close(linear(apart), apart @ linear.weight.T + linear.bias, atol=1e-4, rtol=1e-4)
        assert linear.compute(name, apart[:0]).shape == (0, 300)


def test_inputs_are_quantized_in_all_layers_or_in_none(monkeypatch):
    """One model has one kind of numbers, however many rows a step has; and no machine adds them up wrongly."""
    linear = float_linear(64, 32)
    weight, scales = quantize(linear.weight, torch.float32)
    for int8_inputs, exact, expected in ((True, True, {"int8"}), (False, True, NOT_INT8), (True, False, NOT_INT8)):
        monkeypatch.setattr(layers, "multiplies_int8", lambda exact=exact: exact)
        quantized = Int8Linear(weight, scales, linear.bias, Kernels(int8_inputs=int8_inputs))
        assert set(quantized.candidates) == expected
        assert {quantized.for_many} <= expected


def test_more_dimensions_are_rows():
    for linear in (float_linear(6, 4), int8_linear(float_linear(6, 4))):
        inputs = inputs_for(linear, 6).view(2, 3, 4)
        flat = linear(inputs.view(6, 4))
        linear.kernels.chosen[linear.shape] = ((1, "stock" if isinstance(linear, FloatLinear) else "dequantized"),)
        torch.testing.assert_close(linear(inputs), flat.view(2, 3, 6), atol=0.1, rtol=0.1)


# -- the choice --------------------------------------------------------------------------------------------------------


@define(eq=False)
class Bench:
    """A clock that a kernel moves on by what it is said to take: ``cost(name, rows)`` seconds."""

    cost: object
    now: float = 0.0
    calls: list = field(factory=list)

    def clock(self):
        return self.now

    def linear(self, linear):
        bench = self

        class Timed(type(linear)):
            def compute(self, name, inputs):
                bench.calls.append((name, len(inputs), self))
                bench.now += bench.cost(name, len(inputs))
                return inputs

        parts = [linear.weight, linear.bias] if isinstance(linear, FloatLinear) else None
        assert parts is not None, "the bench times weights as they are"
        return Timed(*parts, linear.kernels)


def chosen(bench, *, linears=3, size=(512, 256), seconds=1e9, file=None):
    made = [bench.linear(float_linear(*size)) for _ in range(linears)]
    kernels = Kernels()
    choose(made, kernels, file=file, clock=bench.clock, seconds=seconds)
    return kernels, made[0].shape


def test_the_fastest_is_chosen_for_each_number_of_rows():
    """Torch's own is good for one row and for many, another one between."""

    def cost(name, rows):
        few = {"stock": 4.0, "weight_first": 2.0, "blocked": 1.0, "onednn": 3.0}
        return 1e-5 * (few[name] if 4 <= rows < 32 else 1.0 if name == "stock" else 2.0)

    kernels, shape = chosen(Bench(cost))
    assert kernels.chosen[shape] == ((1, "stock"), (4, "blocked"), (32, "stock"))
    assert [kernels.find(shape, rows) for rows in (1, 3, 4, 31, 32, 5000)] == [
        "stock",
        "stock",
        "blocked",
        "blocked",
        "stock",
        "stock",
    ]


def test_what_is_hardly_faster_is_chance():
    kernels, shape = chosen(Bench(lambda name, rows: 1e-5 if name == "stock" else 0.95e-5))
    assert kernels.chosen[shape] == ((1, "stock"),)


def test_the_layers_take_turns():
    """A layer that has just been computed lies in the caches."""
    bench = Bench(lambda name, rows: 1e-5)
    chosen(bench, linears=3)
    assert all(first[2] is not second[2] for first, second in zip(bench.calls, bench.calls[1:], strict=False))


def test_a_kernel_that_is_far_too_slow_is_not_tried_with_more_rows():
    bench = Bench(lambda name, rows: 1.0 if name == "onednn" else 1e-6)
    chosen(bench)
    assert {rows for name, rows, _ in bench.calls if name == "onednn"} == {1}


def test_what_takes_long_is_not_tried_at_all():
    bench = Bench(lambda name, rows: 1e-3 * rows)
    kernels, shape = chosen(bench)
    assert kernels.chosen[shape] == ((1, "stock"),)
    assert max(rows for _, rows, _ in bench.calls) == 32


def test_the_time_is_limited_and_what_is_open_is_left_to_torch():
    bench = Bench(lambda name, rows: 1.0)
    kernels, shape = chosen(bench, seconds=0.0)
    assert kernels.find(shape, 3) is None
    assert not bench.calls


def test_a_choice_is_whole_or_none(tmp_path):
    """Half of one would be remembered, and taken for many rows too. One that takes longer than there is time must be
    found at some time: the shape that has begun is finished, and the next one is for the next time."""
    file = ChoiceFile(CacheFile(tmp_path / "kernels.json"), "this machine")
    bench = Bench(lambda name, rows: 1e-3)
    large, small = bench.linear(float_linear(1024, 256)), bench.linear(float_linear(512, 256))
    kernels = Kernels()
    choose([small, large], kernels, file=file, clock=bench.clock, seconds=0.1)
    assert kernels.chosen == {large.shape: ((1, "stock"),)}
    assert bench.now > 0.1
    calls = len(bench.calls)
    kernels = Kernels()
    choose([small, large], kernels, file=file, clock=bench.clock, seconds=0.1)
    assert set(kernels.chosen) == {small.shape, large.shape}
    assert {linear.shape for _, _, linear in bench.calls[calls:]} == {small.shape}


def test_a_kernel_that_this_machine_has_not_is_left_out():
    """Unless it is torch's own, whose error is told."""

    def cost(name, rows):
        if name == broken:
            raise RuntimeError("could not create a primitive descriptor")
        return 1e-6

    broken = "onednn"
    kernels, shape = chosen(Bench(cost))
    assert kernels.chosen[shape] == ((1, "stock"),)
    broken = "stock"
    with pytest.raises(RuntimeError, match="primitive"):
        chosen(Bench(cost))


def test_small_layers_are_not_worth_it():
    bench = Bench(lambda name, rows: 1e-6)
    kernels, shape = chosen(bench, size=(16, 16))
    assert (kernels.find(shape, 1), bench.calls) == (None, [])


def test_a_choice_is_remembered_by_machine(tmp_path):
    """Nothing is timed again on the same machine; another one times for itself."""
    file = ChoiceFile(CacheFile(tmp_path / "deep" / "kernels.json"), "this machine")
    first, shape = chosen(Bench(lambda name, rows: 1e-6 if name == "blocked" else 1e-5), file=file)
    assert first.chosen[shape] == ((1, "blocked"),)
    again = Bench(lambda name, rows: 1e-6)
    assert chosen(again, file=file)[0].chosen == first.chosen
    assert not again.calls
    elsewhere = Bench(lambda name, rows: 1e-6)
    chosen(elsewhere, file=ChoiceFile(file.cache, "another machine"))
    assert elsewhere.calls
    assert set(json.loads(file.cache.path.read_text())) == {"this machine", "another machine"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"this machine": 3}',
        '{"this machine": {"float32 512x256": [[1, "gone"]]}}',
        '{"this machine": {"float32 512x256": 7}}',
    ],
)
def test_a_file_that_nobody_can_follow_is_measured_again(tmp_path, text):
    file = ChoiceFile(CacheFile(tmp_path / "kernels.json"), "this machine")
    file.cache.path.write_text(text)
    bench = Bench(lambda name, rows: 1e-6)
    kernels, shape = chosen(bench, file=file)
    assert bench.calls
    assert file.known()(float_linear(512, 256)) == kernels.chosen[shape]


def test_a_file_that_cannot_be_written_is_no_fault(tmp_path, caplog):
    (tmp_path / "taken").write_text("a file where a folder should be")
    caplog.set_level("INFO", "triolet")
    kernels, shape = chosen(
        Bench(lambda name, rows: 1e-6), file=ChoiceFile(CacheFile(tmp_path / "taken" / "kernels.json"), "this machine")
    )
    assert kernels.chosen[shape]
    assert "not remembered" in caplog.text


def test_the_users_file_is_where_caches_are(tmp_path):
    read = {"/proc/cpuinfo": "model name : Good CPU\nflags : fpu avx2 sse amx_int8\n"}.get
    file = ChoiceFile.of_user({"XDG_CACHE_HOME": str(tmp_path)}, read=read, threads=7)
    assert file.cache.path == tmp_path / "triolet" / "kernels.json"
    assert file.machine == f"Good CPU (amx_int8 avx2), torch {torch.__version__}, 7 threads"
    assert ChoiceFile.of_user({"HOME": "/home/asa"}, read=read).cache.path == Path(
        "/home/asa/.cache/triolet/kernels.json"
    )
    ChoiceFile.of_user({}, read={}.get)  # a container may know no user at all


def test_choices_are_told_in_lines(tmp_path):
    """What nobody can read is left out."""
    file = ChoiceFile(CacheFile(tmp_path / "kernels.json"), "this machine")
    assert file.lines() == []
    broken = {"float32 8x8": 7, "float32 1x1": [[1]], "float32 64x32": [[1, "stock"], [4, "blocked"]]}
    file.cache.path.write_text(json.dumps({"this machine": broken, "another": {"float32 9x9": [[1, "stock"]]}}))
    assert file.lines() == ["float32 64x32: stock, from 4 rows blocked"]


def test_real_layers_are_measured():
    """With the clock of the machine: whatever is chosen computes the same."""
    linear, kernels = float_linear(640, 128), Kernels()
    choose([linear], kernels, file=None)
    steps = kernels.chosen[linear.shape]
    assert {name for _, name in steps} <= FLOAT.keys()
    assert {rows for rows, _ in steps} <= set(ROWS)
    quantized = int8_linear(linear, torch.bfloat16)
    choose([quantized], kernels, file=None)
    assert {name for _, name in kernels.chosen[quantized.shape]} <= INT8.keys()
