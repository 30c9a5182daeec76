"""Checkpoints in the layouts of GPTQ, AWQ, compressed-tensors, FP8 and bitsandbytes stand for what is published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from triolet.core.config import EngineConfig
from triolet.core.errors import CheckpointError, UnsupportedModel
from triolet.models.blueprints.estimate import ODDS, estimate
from triolet.models.checkpoints.loading import stored_weights
from triolet.models.checkpoints.stored import StoredTensor
from triolet.models.checkpoints.unread import UnreadTensor
from triolet.models.native.parts import PackedLinear

from ..checkpoints import quantized_checkpoints as layouts
from ..checkpoints.checkpoints import rewrite
from .test_estimate import held
from .texts import Job, generate, noise

KINDS: dict[str, tuple[Any, str | None]] = {
    "gptq": (layouts.gptq(), "INT4_32"),
    "gptq, act-order": (layouts.gptq(ordered=True, second=True), "INT4_32"),
    "gptq, wide groups": (layouts.gptq(group=128, symmetric=True), "INT4_128"),
    "gptq, act-order, wide groups": (layouts.gptq(group=128, ordered=True), "INT4_128"),
    "gptq, 8 bits": (layouts.gptq(bits=8, symmetric=True), "Q8_0"),
    "gptq, 8 bits, zeros": (layouts.gptq(bits=8), None),
    "awq": (layouts.awq(), "INT4_32"),
    "awq, wide groups": (layouts.awq(group=128), "INT4_128"),
    "awq, small groups": (layouts.awq(group=16), None),
    "packed": (layouts.compressed(), "INT4_32"),
    "packed, zeros": (layouts.compressed(symmetric=False, group=64), "INT4_32"),
    "packed, act-order": (layouts.compressed(symmetric=False, ordered=True), "INT4_32"),
    "packed, by rows": (layouts.compressed(group=None), "INT4_128"),
    "packed, 8 bits": (layouts.compressed(bits=8), "Q8_0"),
    "packed, 8 bits, zeros": (layouts.compressed(bits=8, symmetric=False), None),
    "fp8": (layouts.fp8(), None),
    "fp8, one scale": (layouts.fp8(block=None), None),
    "nf4": (layouts.nf4(), None),
    "nf4, plain scales": (layouts.nf4(nested=False), None),
    "int8 of bitsandbytes": (layouts.of_bytes(), None),
}
ENGINES = ("gptq", "gptq, act-order", "gptq, 8 bits", "awq, wide groups", "packed, zeros", "fp8", "nf4")
PROMPTS = tuple(noise(length, length) for length in (3, 17))


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    return layouts.make_wide(tmp_path_factory.mktemp("wide") / "model")


@pytest.fixture(scope="module")
def written(wide, tmp_path_factory):
    made: dict[str, tuple[Path, Path]] = {}

    def write(name: str) -> tuple[Path, Path]:
        if name not in made:
            made[name] = layouts.quantize(wide, tmp_path_factory.mktemp("made"), *KINDS[name][0])
        return made[name]

    return write


def read(folder):
    told = transformers.AutoConfig.from_pretrained(folder).quantization_config
    return stored_weights(folder, StoredTensor, told)


@pytest.mark.parametrize("name", KINDS)
def test_a_matrix_is_read_bit_for_bit(written, name):
    """All rows and some of them, as numbers and as the blocks that the library packs."""
    quantized, plain = written(name)
    weights = load_file(plain / "model.safetensors")
    found = read(quantized)
    assert found.keys() == weights.keys()
    for key, weight in weights.items():
        stored = found[key]
        assert torch.equal(stored.read(torch.float32), weight)
        if "_proj" not in key:
            continue
        assert stored.block_kind == KINDS[name][1]
        lazy: Any = UnreadTensor(stored.shape, torch.float32, stored)
        assert torch.equal(lazy.read_rows(5, 21), weight[5:21])
        if stored.block_kind is not None:
            packed = layouts.unpacked(lazy.block_kind, lazy.blocks_of(3, 40), stored.shape[1])
            order = slice(None) if lazy.input_order is None else lazy.input_order.argsort()
            assert torch.equal(packed[:, order], weight[3:40])


@pytest.mark.parametrize("name", ENGINES)
def test_the_engine_writes_the_tokens_of_the_weights(open_driver, written, name):
    quantized, plain = written(name)
    driver = open_driver(quantized)
    told = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    jobs = [Job(prompt=prompt) for prompt in PROMPTS]
    together = [one.tokens for one in driver.run(*jobs)]
    assert together == [generate(told, prompt, 16) for prompt in PROMPTS]
    assert together == [driver.run(job)[0].tokens for job in jobs]
    linears = [one for one in driver.executor._open.parts.model.module.modules() if isinstance(one, PackedLinear)]
    kinds = {section.kind for one in linears for section in one.sections}
    assert kinds == ({KINDS[name][1]} if KINDS[name][1] else set())


@pytest.mark.parametrize(("name", "kinds"), [("awq", ["INT4_32"]), ("gptq, act-order", [])])
def test_experts_keep_their_blocks_unless_each_has_an_order(open_driver, tmp_path, name, kinds):
    sizes = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
    plain = layouts.make_wide(tmp_path / "made", "Qwen3Moe", **sizes)
    quantized, plain = layouts.quantize(plain, tmp_path, *KINDS[name][0])
    driver = open_driver(quantized)
    told = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    assert driver.run(Job(prompt=PROMPTS[1]))[0].tokens == generate(told, PROMPTS[1], 16)
    experts = driver.executor._open.parts.model.module.model.layers[0].mlp.experts
    assert [[one.kind for one in each.sections] for each in (experts.widen, experts.narrow)] == [kinds, kinds]
    config = EngineConfig(device="cpu", threads=1, dtype="float32")
    thought, found = estimate(quantized, config), held(quantized, config)
    assert abs(thought.by_owner["weights"] - ODDS - found["weights"]) < 10_000


def test_torch_computes_them_too(open_driver, written, without_native):
    quantized, plain = written("gptq, act-order")
    told = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    driver = open_driver(quantized, dtype="float32")
    assert driver.run(Job(prompt=PROMPTS[1]))[0].tokens == generate(told, PROMPTS[1], 16)


@pytest.mark.parametrize("name", ["gptq, act-order", "awq, wide groups", "packed, 8 bits", "nf4"])
def test_an_estimate_counts_them_as_they_are_held(written, name):
    config = EngineConfig(device="cpu", threads=1, dtype="float32")
    thought, found = estimate(written(name)[0], config), held(written(name)[0], config)
    assert abs(thought.by_owner["weights"] - ODDS - found["weights"]) < 10_000


REFUSED = {
    "gptq with 3 bits": {"quant_method": "gptq", "bits": 3},
    "gptq in the format marlin": {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
    "awq in the layout gemv": {"quant_method": "awq", "bits": 4, "version": "GEMV"},
    "awq with 8 bits": {"quant_method": "awq", "bits": 8},
    "scales of the kind ue8m0": {"quant_method": "fp8", "scale_fmt": "ue8m0"},
    "aqlm": {"quant_method": "aqlm"},
    "the format nvfp4-pack-quantized": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
    "int with 2 bits": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"a": {"weights": {"num_bits": 2, "type": "int", "strategy": "channel"}}},
    },
    "rotations of inputs": {"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"R1": {}}}},
}


@pytest.mark.parametrize("told", REFUSED)
def test_other_layouts_are_refused_by_name(open_driver, wide, tmp_path, told):
    layouts.shutil.copytree(wide, tmp_path / "copy")
    rewrite(tmp_path / "copy" / "config.json", quantization_config=REFUSED[told])
    with pytest.raises(UnsupportedModel, match=f"{told}.*supported: "):
        open_driver(tmp_path / "copy")


LAYER = "model.layers.0.mlp.up_proj"
BROKEN = {
    "there is no scales": ("gptq", {"scales": None}),
    "qzeros has the shape": ("gptq", {"qzeros": torch.zeros(3, 32, dtype=torch.int32)}),
    "numbers have 2 bits": ("awq", {"qzeros": torch.zeros(4, 16, dtype=torch.int32)}),
    "g_idx does not name one of 4 groups": ("gptq", {"g_idx": torch.full((128,), 4, dtype=torch.int32)}),
    "weight_packed has the shape": ("packed", {"weight_packed": torch.zeros(256, 17, dtype=torch.int32)}),
    "there is no weight_scale": ("packed", {"weight_scale": None}),
    "do not fit": ("fp8", {"weight_scale_inv": torch.ones(5, 2)}),
    "quant_state cannot be read": ("nf4", {"weight.quant_state.bitsandbytes__nf4": torch.zeros(4, dtype=torch.uint8)}),
    "is of F8_E4M3, and has no scales": ("fp8", {"weight_scale_inv": None}),
}


@pytest.mark.parametrize("told", BROKEN)
def test_parts_that_do_not_fit_are_refused(open_driver, written, tmp_path, told):
    name, changes = BROKEN[told]
    layouts.shutil.copytree(written(name)[0], tmp_path / "copy")
    weights = load_file(tmp_path / "copy" / "model.safetensors")
    for end, one in changes.items():
        del weights[f"{LAYER}.{end}"]
        weights |= {} if one is None else {f"{LAYER}.{end}": one}
    save_file(weights, tmp_path / "copy" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=told):
        open_driver(tmp_path / "copy")


def test_orders_of_inputs_are_not_joined(written):
    """Neighbours whose orders may differ are no matrix of blocks, but their values are."""
    quantized, plain = written("gptq, act-order")
    found, weights = read(quantized), load_file(plain / "model.safetensors")
    names = [f"model.layers.0.self_attn.{one}_proj.weight" for one in "qk"]
    joined: Any = torch.cat([UnreadTensor(found[name].shape, torch.float32, found[name]) for name in names])
    assert joined.block_kind is None
    assert torch.equal(joined.read(), torch.cat([weights[name] for name in names]))
