"""`EngineConfig.quantization` is "int4": linear layers become blocks of 4 bits when a model is loaded."""

from __future__ import annotations

from typing import Any

import gguf
import pytest
import torch

from triolet.core.config import EngineConfig
from triolet.core.errors import InvalidRequest
from triolet.models.blueprints.estimate import ODDS, estimate
from triolet.models.linear.rounded import int4_blocks, int8_blocks
from triolet.models.native.parts import PackedLinear

from ..checkpoints.quantized_checkpoints import gptq, make_wide, quantize
from .test_estimate import held
from .texts import Job, noise

JOBS = [Job(prompt=noise(length, length)) for length in (3, 17)]


def decoded(blocks, kind):
    return torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind]))


def test_a_block_of_what_4_bits_hold_is_exact():
    """Whatever the least value and the scale, if float16 holds them."""
    dice = torch.Generator().manual_seed(3)
    numbers = torch.randint(0, 16, (64, 32), generator=dice).float()
    numbers[:, :2] = torch.tensor([0.0, 15.0])
    scales, least = torch.rand(64, 1, generator=dice).half(), torch.randn(64, 1, generator=dice).half()
    values = numbers * scales.float() + least.float()
    assert torch.allclose(decoded(int4_blocks(values), "Q4_1"), values, atol=2e-3)


def test_blocks_fit_better_than_the_nearest_numbers():
    values = torch.randn(512, 32, generator=torch.Generator().manual_seed(5)) * 0.02
    low, high = values.aminmax(dim=1, keepdim=True)
    scale = (high - low) / 15
    nearest = ((values - low) / scale).round() * scale + low
    found = (decoded(int4_blocks(values), "Q4_1") - values).square().mean()
    assert found < 0.9 * (nearest - values).square().mean()
    assert (decoded(int8_blocks(values), "Q8_0") - values).abs().max() < values.abs().max() / 200


@pytest.mark.parametrize("value", [0.0, 0.25, -3.0])
def test_a_block_of_equal_values_is_that_value(value):
    values = torch.full((2, 32), value)
    assert torch.equal(decoded(int4_blocks(values), "Q4_1"), values)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    return make_wide(tmp_path_factory.mktemp("wide") / "model")


def sections(driver):
    module = driver.executor._open.parts.model.module
    linears = {name: one for name, one in module.named_modules() if isinstance(one, PackedLinear)}
    return {name.rpartition(".")[2]: [each.kind for each in one.sections] for name, one in linears.items()}


def test_linear_layers_are_held_in_4_bits(open_driver, wide):
    driver = open_driver(wide, quantization="int4")
    found = sections(driver)
    assert found["q_proj"] == ["Q4_1", "Q8_0"]  # of queries and keys, and of values, which are one matrix
    assert found["down_proj"] == ["Q4_1"]
    assert found["lm_head"] == []
    together = driver.run(*JOBS)
    assert [one.tokens for one in together] == [driver.run(job)[0].tokens for job in JOBS]
    config = EngineConfig(device="cpu", threads=1, dtype="float32", quantization="int4")
    thought, held_by = estimate(wide, config), held(wide, config)
    assert abs(thought.by_owner["weights"] - ODDS - held_by["weights"]) < 10_000


def test_what_has_4_bits_in_the_checkpoint_keeps_them(open_driver, wide, tmp_path):
    driver = open_driver(quantize(wide, tmp_path, *gptq())[0], quantization="int4")
    found: Any = sections(driver)
    assert set(found["q_proj"]) == {"INT4_32"}


def test_it_is_for_text_models(open_driver, folder):
    with pytest.raises(InvalidRequest, match=r"quantization='int4' is given for Moonshine.*allowed: 'int8'"):
        open_driver(folder("moonshine"), quantization="int4")


def test_torch_alone_has_no_4_bits(open_driver, wide, without_native):
    with pytest.raises(InvalidRequest, match=r"quantization='int4'.*native library.*allowed: quantization='int8'"):
        open_driver(wide, quantization="int4")
