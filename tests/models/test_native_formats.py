"""Numbers of 16 bits in the native library: in pages and slots the nearest ones are written, and read as they are; and
products in bfloat16."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import Tensor
from transformers import AutoModel

from triolet.core.request import Pooling
from triolet.models.memory.rows import Rows
from triolet.models.memory.slots import CrossKV
from triolet.models.native.library import Ending, Library
from triolet.models.native.panels import Panels
from triolet.models.native.parts import PackedLinear
from triolet.models.native.program import Attention, Program
from triolet.models.native.runner import Runner

from .fed import loaded, sequences_of
from .native_decoders import POSITIONS, decoder_of, fed
from .texts import Job, noise

pytestmark = pytest.mark.skipif(Library.load() is None, reason="installed without a compiler")


@pytest.mark.parametrize("kept", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("level", [1, 3, 4])
@pytest.mark.parametrize("name", ["llama", "heads of 12", "norms of heads of 20"])
def test_pages_of_16_bits_hold_the_nearest_numbers(name: str, level: int, kept: torch.dtype) -> None:
    """Those of the first layer, which reads none; and logits are as near as such numbers are. These models magnify."""
    draw = random.Random(3)
    sequences = sequences_of([150, 1, 40, 300], 16, draw)
    with fed(name, level=level) as plain, fed(name, level=level, kept=kept) as one:
        expected, found = (each.all_of(sequences, random.Random(1)) for each in (plain, one))
        torch.testing.assert_close(one.pages[0], plain.pages[0].to(kept), rtol=0.0, atol=0.0, equal_nan=True)
        for before, now in zip(expected, found, strict=True):
            apart = (now - before).abs().amax(1) / before.abs().max()
            assert 0.0 < float(apart.median()) < 8 * torch.finfo(kept).eps


def any_bits(count: int) -> Tensor:
    """Numbers of float32 of every kind."""
    bits = torch.randint(-(2**31), 2**31, (count,), generator=torch.Generator().manual_seed(1))
    return bits.int().view(torch.float32)


def nearest(values: Tensor, kept: torch.dtype) -> Tensor:
    """What is beyond the largest number becomes that; infinity and NaN stay."""
    most = torch.finfo(kept).max
    return torch.where(values.isfinite(), values.clamp(-most, most), values).to(kept)


@pytest.mark.parametrize("kept", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("level", [1, 3, 4])
def test_every_number_of_16_bits_is_read_and_the_nearest_is_written(level: int, kept: torch.dtype) -> None:
    """Of each number, of what is between two, of the smallest and the largest, and of broken ones: as values, which a
    row that sees itself alone has for its answer."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(kept).float()
    between = (every.double() + every.roll(1).double()).div(2).float()
    beside = torch.stack([between.nextafter(torch.tensor(end)) for end in (-torch.inf, torch.inf)])
    values = torch.cat([every, between, *beside, any_bits(2**16)]).view(-1, 64)
    program = Program()
    program.attend(
        program.buffer(3 * 64),
        program.buffer(64),
        Attention(layer=0, heads=1, kv_heads=1, size=64, scale=1.0, turned=0),
    )
    pages = torch.full((1, len(values), 1, 2 * 64), float("nan"), dtype=kept)
    with torch.inference_mode():
        runner = Runner.open(loaded(), program, pages, rows=512, positions=1, threads=2, level=level)
        inputs = torch.cat([torch.zeros(len(values), 2 * 64), values], 1)
        count = range(len(values))
        rows = Rows(positions=[0] * len(values), chunks=[(1, row, 0, 0) for row in count], tables=count, wanted=count)
        found = runner.step(inputs, rows)
        runner.release()
    expected = nearest(values, kept)
    torch.testing.assert_close(pages[0, :, 0, 64:], expected, rtol=0.0, atol=0.0, equal_nan=True)
    torch.testing.assert_close(found, expected.float(), rtol=0.0, atol=0.0, equal_nan=True)


def test_a_format_that_pages_cannot_have_is_refused() -> None:
    decoder = decoder_of("llama")
    decoder.pack()
    pages = torch.zeros((2, 4, 16, 64), dtype=torch.uint8)
    with pytest.raises(AssertionError, match="an operation would leave the buffers"):
        Runner.open(loaded(), decoder.program(POSITIONS), pages, rows=8, positions=64, threads=1)


@pytest.mark.parametrize("kept", [torch.float16, torch.bfloat16])
def test_a_slot_of_16_bits_holds_the_nearest_numbers(kept: torch.dtype) -> None:
    """As pages do: what is beyond the largest number becomes that, and what is broken stays so."""
    numbers = any_bits(2 * 2 * 3 * 5 * 7)
    numbers[:5] = torch.tensor([1e38, -7e4, torch.inf, -torch.inf, torch.nan])
    sizes = {"layers": 2, "slots": 1, "heads": 3, "embeddings": 5, "head_dim": 7}
    for written in (numbers, numbers.nan_to_num().clamp(-9.0, 9.0)):
        cross = CrossKV.allocate(**sizes, dtype=kept, device=torch.device("cpu"))
        cross.write_all(0, written.view(5, -1), lambda rows: rows)
        expected = nearest(written.view(5, 2, 2, 3, 7).permute(1, 2, 3, 0, 4), kept)
        torch.testing.assert_close(cross.tensors()[0][:, :, 0], expected, rtol=0.0, atol=0.0, equal_nan=True)
        cross.begin(0, 5)
        cross.write(0, 1, *written.view(2, 2, 3, 5, 7)[0])
        expected = nearest(written.view(2, 2, 3, 5, 7)[0], kept)
        torch.testing.assert_close(cross.tensors()[0][1, :, 0], expected, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("level", [1, 3, 4, 5])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (77, 33), (576, 96)])
def test_a_product_in_bfloat16_is_that_of_the_rounded_inputs(level: int, inputs: int, outputs: int) -> None:
    """With sums in float32; a row has the same bits alone and beside any others, on any number of threads."""
    make = torch.Generator().manual_seed(inputs)
    weight, bias = torch.randn(outputs, inputs, generator=make).bfloat16(), torch.randn(outputs, generator=make)
    rows = torch.randn(100, inputs, generator=make)
    panels = Panels.of(weight, bias)
    found = [product(panels, rows[:count], level, threads) for count, threads in [(100, 1), (100, 3), (7, 2)]]
    expected = rows.bfloat16().double() @ weight.double().T + bias
    torch.testing.assert_close(found[0].double(), expected, atol=1e-6 * inputs**0.5, rtol=1e-6)
    for first, other in [(0, found[1]), (0, found[2]), (13, product(panels, rows[13:14], level))]:
        assert torch.equal(other, found[0][first : first + len(other)])


@pytest.mark.parametrize("level", [1, 3, 4, 5])
def test_a_weight_that_is_only_held_in_bfloat16_is_multiplied_in_float32(level: int) -> None:
    make = torch.Generator().manual_seed(0)
    weight, rows = torch.randn(64, 128, generator=make).bfloat16(), torch.randn(9, 128, generator=make)
    panels = Panels.of(weight.float())
    assert panels.packed.dtype == torch.bfloat16
    expected = rows.double() @ weight.double().T
    torch.testing.assert_close(product(panels, rows, level).double(), expected, atol=1e-5, rtol=1e-5)
    assert not torch.equal(product(panels, rows, level), product(Panels.of(weight), rows, level))


def product(panels: Panels, rows: Tensor, level: int, threads: int = 1) -> Tensor:
    """The product of a program of one operation."""
    program = Program()
    program.linear(program.buffer(panels.inputs), program.buffer(panels.outputs), panels, Ending.STORE)
    with torch.inference_mode():
        count = len(rows)
        runner = Runner.open(loaded(), program, None, rows=count, positions=count, threads=threads, level=level)
        found = runner.step(rows.clone(), Rows.all_of(count))
        runner.release()
    return found


@pytest.mark.parametrize("family", ["llama", "gemma3", "bert"])
def test_a_model_in_bfloat16_is_computed_by_the_library(open_driver, folder, family: str) -> None:
    """Nearer to its weights in float32 than transformers in bfloat16 is, since states and sums are in float32."""
    driver, prompt = open_driver(folder(family), dtype="bfloat16"), noise(23, 5)
    held = [one for one in driver.executor._open.parts.model.module.modules() if isinstance(one, PackedLinear)]
    assert {(one.packed.dtype, one.packed.dim()) for one in held} == {(torch.bfloat16, 4)}, "pairs of inputs"
    (found,) = driver.run(Job(prompt=prompt, pooling=Pooling(kind="last")))
    theirs = AutoModel.from_pretrained(folder(family), dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        rounded, exact = (
            model(torch.tensor([prompt])).last_hidden_state[0, -1].float()
            for model in (theirs, copy.deepcopy(theirs).float())
        )
    ours = torch.tensor(found.vector)
    assert 0.0 < float((ours - exact).norm()) < float((rounded - exact).norm())
