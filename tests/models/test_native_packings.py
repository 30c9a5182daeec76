"""Quantized blocks in the native library: a packed weight is exactly what `gguf` makes of its block, and products are
those of these weights."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

from triolet.models.memory.rows import Rows
from triolet.models.native.library import Library
from triolet.models.native.packings import PACKINGS
from triolet.models.native.panels import Panels
from triolet.models.native.program import Program
from triolet.models.native.runner import Runner

from .blocks import KINDS, Blocks
from .fed import loaded
from .test_native_formats import product

pytestmark = pytest.mark.skipif(Library.load() is None, reason="installed without a compiler")


def panels_of(*blocks: Blocks, planes: int = 2) -> Panels:
    made = Panels.of_blocks(blocks, planes=planes)
    assert made is not None
    return made


def test_every_kind_is_tried() -> None:
    assert set(KINDS) == set(PACKINGS) - {"Q8_32"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_weight_is_what_its_block_means(kind: str) -> None:
    """The bits of every weight, of whole panels and of a part of one; and no byte is added but for padding."""
    one = Blocks.random(kind, 70, 512)
    panels, expected = panels_of(one), one.weights()
    assert torch.equal(panels.part(0, 70), expected)
    places = torch.tensor([69, 3, 3, 64, 31])
    assert torch.equal(panels.rows(places), expected[places])
    whole = Blocks.random(kind, 96, 2048)
    assert len(panels_of(whole).packed) <= 1.03 * whole.bytes.numel()


@pytest.mark.parametrize("level", [1, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_that_of_the_weights(kind: str, level: int) -> None:
    """With inputs of 16 bits as near as these are, with inputs of 8 bits exactly by the rounded inputs; and a row has
    the same bits beside any others."""
    one = Blocks.random(kind, 96, 768)
    rows = torch.randn(40, 768, generator=torch.Generator().manual_seed(1))
    expected = rows.double() @ one.weights().double().T
    fine = product(panels_of(one), rows, level)
    largest = expected.abs().max()
    assert (fine - expected).abs().max() < 5e-5 * largest
    groups = rows.view(40, -1, 32)
    scales = groups.abs().amax(-1, keepdim=True) / 127.0
    rounded = ((groups / scales).round() * scales).view(40, -1)
    coarse = panels_of(one, planes=1)
    found = product(coarse, rows, level, threads=2)
    torch.testing.assert_close(
        found.double(), rounded.double() @ one.weights().double().T, rtol=1e-4, atol=1e-5 * float(largest)
    )
    for panels, whole in ((panels_of(one), fine), (coarse, found)):
        for first, count in ((0, 1), (7, 5), (30, 10)):
            assert torch.equal(product(panels, rows[first : first + count], level), whole[first : first + count])


@pytest.mark.parametrize("planes", [1, 2])
def test_matrices_of_several_kinds_lie_together(planes: int) -> None:
    parts = [Blocks.random(kind, 64, 256, seed) for seed, kind in enumerate(("Q4_K", "Q4_K", "Q6_K", "Q4_K"))]
    panels = panels_of(*parts, planes=planes)
    assert torch.equal(panels.part(0, 256), torch.cat([part.weights() for part in parts]))
    assert [section.kind for section in panels.sections] == ["Q4_K", "Q6_K", "Q4_K"]
    rows = torch.randn(3, 256, generator=torch.Generator().manual_seed(2))
    expected = torch.cat([product(panels_of(part, planes=planes), rows, 0) for part in parts], 1)
    assert torch.equal(product(panels, rows, 0), expected)


def test_outputs_are_put_in_order() -> None:
    parts, order = [Blocks.random("Q4_0", 20, 64, seed) for seed in (1, 2)], torch.randperm(40)
    panels = Panels.of_blocks(parts, None, order, planes=2)
    assert panels is not None
    assert torch.equal(panels.part(0, 40), torch.cat([part.weights() for part in parts])[order])


def test_outputs_of_several_kinds_are_put_in_order() -> None:
    """As Qwen3.5's gates, which come behind values, of another kind, and are one layer with queries."""
    parts = [Blocks.random(kind, 64, 64, seed) for seed, kind in enumerate(("Q4_1", "Q4_1", "Q8_0"))]
    mixed = torch.randperm(128, generator=torch.Generator().manual_seed(1))
    order = torch.cat([mixed[:96], torch.arange(128, 192).flip(0), mixed[96:]])
    panels = Panels.of_blocks(parts, None, order, planes=2)
    assert panels is not None
    assert [(one.kind, one.panels) for one in panels.sections] == [("Q4_1", 3), ("Q8_0", 2), ("Q4_1", 1)]
    assert torch.equal(panels.part(0, 192), torch.cat([part.weights() for part in parts])[order])


def test_what_cannot_lie_together_is_not_packed() -> None:
    plain, odd = torch.zeros(32, 64), Blocks.random("Q4_0", 33, 64)
    assert Panels.of_blocks([Blocks.random("Q8_0", 32, 64), plain], planes=2) is None
    assert Panels.of_blocks([odd, Blocks.random("Q8_0", 32, 64)], planes=2) is None
    assert Panels.of_blocks([Blocks.random("Q8_0", 32, 64), odd], None, torch.arange(65).flip(0), planes=2) is None


@pytest.mark.parametrize("level", [1, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_an_embedding_is_the_weights(kind: str, level: int) -> None:
    one, program = Blocks.random(kind, 64, 256), Program()
    program.look_up(program.buffer(256), panels_of(one), 1.0)
    with torch.inference_mode():
        runner = Runner.open(loaded(), program, None, rows=3, positions=3, threads=1, level=level)
        found = runner.step([63, 0, 33], Rows.all_of(3))
        runner.release()
    assert torch.equal(found, one.weights()[[63, 0, 33]])


@pytest.mark.parametrize("planes", [1, 2])
def test_inputs_may_have_an_order(planes: int) -> None:
    """As those of a matrix that GPTQ has quantized in the order of their size."""
    order = torch.randperm(256, generator=torch.Generator().manual_seed(4)).int()
    parts = [evolve(Blocks.random("INT4_128", 64, 256, seed), input_order=order) for seed in (1, 2)]
    panels, rows = panels_of(*parts, planes=planes), torch.randn(5, 256, generator=torch.Generator().manual_seed(5))
    assert torch.equal(panels.part(0, 128), torch.cat([part.weights() for part in parts]))
    straight = panels_of(*(evolve(part, input_order=None) for part in parts), planes=planes)
    assert torch.equal(product(panels, rows, 0), product(straight, rows[:, order.long()].contiguous(), 0))
    others = evolve(parts[1], input_order=order.flip(0)), evolve(parts[1], input_order=None)
    assert all(Panels.of_blocks([parts[0], other], planes=planes) is None for other in others)


@pytest.mark.parametrize("kind", ["Q4_K", "MXFP4", "Q5_0"])
def test_broken_inputs_come_out_broken(kind: str) -> None:
    panels, rows = panels_of(Blocks.random(kind, 32, 256)), torch.ones(3, 256)
    rows[0, 5], rows[1, 40] = torch.nan, torch.inf
    found = product(panels, rows, 0)
    assert found[0].isnan().all()
    assert found[1].isnan().all()
    assert found[2].isfinite().all()
