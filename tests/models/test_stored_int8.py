"""Checkpoints that compressed-tensors or torchao quantized to int8 compute what those libraries say."""

from __future__ import annotations

import shutil
import warnings

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from triolet.core.errors import InvalidRequest, UnsupportedModel
from triolet.models.checkpoints.loading import load_module
from triolet.models.checkpoints.turns import TURNS
from triolet.models.linear.modules import QuantizedLinear, exactly
from triolet.models.linear.stored import adopt_quantized

from ..checkpoints.checkpoints import rewrite
from ..checkpoints.families import make_checkpoint
from .texts import Job

PROMPT = list(range(3, 20))


KIND = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False}


def compressed(folder, target):
    """``folder`` with weights and inputs in int8, as compressed-tensors writes it."""
    group = {"weights": {**KIND, "strategy": "channel"}, "input_activations": {**INPUTS, "strategy": "token"}}
    return stored(folder, target, "int-quantized", group, lambda name, rows: {name: rows})


def packed(folder, target):
    """Weights alone, as it writes them: four in one integer."""

    def pack(name, rows):
        fours = torch.nn.functional.pad(rows, (0, -rows.shape[1] % 4)).view(torch.uint8) ^ 128
        shape = {f"{name}_shape": torch.tensor(rows.shape)}
        return {f"{name}_packed": fours.contiguous().view(torch.int32), **shape}

    return stored(folder, target, "pack-quantized", {"weights": {**KIND, "strategy": "channel"}}, pack)


INPUTS = {**KIND, "dynamic": True}


def in_int8(folder):
    """The weights that stay as they are, and the numbers and scales of the others."""
    weights = load_file(folder / "model.safetensors")
    rounded = {}
    for name in [name for name in weights if "_proj." in name]:
        weight = weights.pop(name)
        scale = weight.abs().amax(1, keepdim=True) / 127
        rounded[name] = (weight / scale).round().to(torch.int8), scale
    return weights, rounded


def stored(folder, target, form, group, write):
    shutil.copytree(folder, target)
    found, rounded = in_int8(folder)
    for name, (numbers, scale) in rounded.items():
        found |= {**write(name, numbers), f"{name}_scale": scale}
    save_file(found, target / "model.safetensors", metadata={"format": "pt"})
    told = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"}
    return described(target, {**told, "config_groups": {"a": {"targets": ["Linear"], **group}}, "ignore": ["lm_head"]})


def by_torchao(folder, target):
    """As torchao 0.18 writes `Int8WeightOnlyConfig` by transformers: a tensor for each part of a weight."""
    shutil.copytree(folder, target)
    found, rounded = in_int8(folder)
    for name, (numbers, scale) in rounded.items():
        layer = name.removesuffix("weight")
        found[f"{layer}_weight_qdata"] = numbers
        found[f"{layer}_weight_scale"] = scale
        found[f"{layer}_weight_zero_point"] = torch.zeros_like(scale, dtype=torch.int8)
    save_file(found, target / "model.safetensors", metadata={"format": "pt"})
    return described(target, torchao("Int8WeightOnlyConfig"))


def torchao(kind):
    told = {"_data": {"group_size": None, "set_inductor_config": True}, "_type": kind, "_version": 2}
    return {"quant_method": "torchao", "quant_type": {"default": told}, "modules_to_not_convert": None}


def described(folder, quantization):
    return rewrite(folder / "config.json", quantization_config=quantization).parent


MAKERS = {"inputs": compressed, "weights": packed, "torchao": by_torchao}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return make_checkpoint("llama", tmp_path_factory.mktemp("plain") / "llama")


@pytest.fixture(scope="module", params=MAKERS)
def folder(request, plain, tmp_path_factory):
    return MAKERS[request.param](plain, tmp_path_factory.mktemp("stored") / "llama")


def test_the_layers_compute_what_the_library_says(folder, plain):
    """With the inputs as they are. What torchao writes is read without it."""
    config = transformers.AutoConfig.from_pretrained(folder)
    if config.quantization_config["quant_method"] == "torchao":
        told = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
        for name, weight in told.named_parameters():
            if "_proj." in name:
                scale = weight.data.abs().amax(1, keepdim=True) / 127
                weight.data.copy_((weight.data / scale).round() * scale)
    else:
        options = {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)}
        with TURNS.quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            told = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    found = load_module("LlamaForCausalLM", folder, torch.float32, lazily=True)
    adopt_quantized(found, torch.float32)
    made = [module for module in found.modules() if isinstance(module, QuantizedLinear)]
    assert len(made) == 7 * config.num_hidden_layers
    tokens = torch.tensor([PROMPT])
    with torch.inference_mode(), exactly(found):
        assert torch.allclose(found(tokens).logits, told(tokens).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_the_engine_writes_the_tokens_of_its_weights(open_driver, folder, quantization, without_native):
    """In bfloat16, whose inputs are multiplied as they are; with ``quantization`` the rest is in int8 as well."""
    driver = open_driver(folder, dtype="bfloat16", quantization=quantization)
    linears = [each for each in driver.executor._open.parts.model.module.modules() if isinstance(each, QuantizedLinear)]
    assert len(linears) == 14 + (quantization is not None)
    jobs = [Job(prompt=PROMPT[:length]) for length in (3, 17)]
    together = driver.run(*jobs)
    alone = [driver.run(job)[0] for job in jobs]
    assert [one.tokens for one in together] == [one.tokens for one in alone]


def test_models_that_see_are_refused(open_driver, tmp_path):
    folder = make_checkpoint("qwen2_5_vl", tmp_path / "model")
    with pytest.raises(UnsupportedModel, match="reads images or audio and has quantized weights"):
        open_driver(described(folder, {"quant_method": "compressed-tensors"}))


def test_what_torchao_does_otherwise_is_refused_by_name(open_driver, plain, tmp_path):
    """Other kinds of weights, and factors of inputs."""
    folder = by_torchao(plain, tmp_path / "copy")
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if name.endswith("qdata")).replace("qdata", "act_pre_scale")
    save_file(weights | {name: torch.ones(1)}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=f"has {name}, which is not known of torchao"):
        open_driver(folder)
    with pytest.raises(UnsupportedModel, match=r"by torchao as Int4WeightOnlyConfig \(supported: Int8Dynamic"):
        open_driver(described(folder, torchao("Int4WeightOnlyConfig")))


def test_they_are_for_the_cpu_alone(open_driver, plain, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    copy = described(shutil.copytree(plain, tmp_path / "copy"), {"quant_method": "compressed-tensors"})
    with pytest.raises(InvalidRequest, match=r"quantized weights.*device='cpu'"):
        open_driver(copy, device="cuda")
