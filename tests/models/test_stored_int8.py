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


def stored(folder, target, form, group, write):
    shutil.copytree(folder, target)
    found = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if "_proj." not in name:
            found[name] = weight
            continue
        scale = weight.abs().amax(1, keepdim=True) / 127
        found |= {**write(name, (weight / scale).round().to(torch.int8)), f"{name}_scale": scale}
    save_file(found, target / "model.safetensors", metadata={"format": "pt"})
    told = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"}
    return described(target, {**told, "config_groups": {"a": {"targets": ["Linear"], **group}}, "ignore": ["lm_head"]})


def by_torchao(folder, target):
    """It is not among the packages of the tests: where it is installed, transformers imports it for every model."""
    torchao = pytest.importorskip("torchao.quantization")
    config = transformers.TorchAoConfig(torchao.Int8WeightOnlyConfig())
    transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=config
    ).save_pretrained(target)
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(target)
    return target


def described(folder, quantization):
    return rewrite(folder / "config.json", quantization_config=quantization).parent


MAKERS = {"inputs": compressed, "weights": packed, "torchao": by_torchao}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return make_checkpoint("llama", tmp_path_factory.mktemp("plain") / "llama")


@pytest.fixture(scope="module", params=MAKERS)
def folder(request, plain, tmp_path_factory):
    return MAKERS[request.param](plain, tmp_path_factory.mktemp("stored") / "llama")


def test_the_layers_compute_what_the_library_says(folder):
    """With the inputs as they are."""
    config = transformers.AutoConfig.from_pretrained(folder)
    options = {"dtype": torch.float32}
    if config.quantization_config["quant_method"] == "compressed-tensors":
        options["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
    with TURNS.quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        told = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    by_torchao = config.quantization_config["quant_method"] == "torchao"
    found = load_module("LlamaForCausalLM", folder, torch.float32, quantized=by_torchao, lazily=True)
    assert adopt_quantized(found, torch.float32) == []
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


def test_numbers_of_another_kind_are_refused(plain, tmp_path):
    """float8 is no plain float, and an embedding in int8 is none of ours."""
    module = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    layer = module.model.layers[0].mlp
    layer.up_proj.weight = torch.nn.Parameter(layer.up_proj.weight.to(torch.float8_e4m3fn), requires_grad=False)
    module.model.embed_tokens.weight = torch.nn.Parameter(
        module.model.embed_tokens.weight.to(torch.int8), requires_grad=False
    )
    assert adopt_quantized(module, torch.float32) == ["model.embed_tokens", "model.layers.0.mlp.up_proj"]


def test_models_that_see_are_refused(open_driver, tmp_path):
    folder = make_checkpoint("qwen2_5_vl", tmp_path / "model")
    with pytest.raises(UnsupportedModel, match="reads images or audio and has quantized weights"):
        open_driver(described(folder, {"quant_method": "compressed-tensors"}))


def test_without_the_library_its_package_is_named(open_driver, plain, tmp_path, monkeypatch):
    def missing(*_, **__):
        raise ImportError("it requires `pip install torchao`")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", missing)
    monkeypatch.setattr(transformers.LlamaForCausalLM, "from_pretrained", missing)
    with pytest.raises(UnsupportedModel, match=r"needs a package.*pip install torchao"):
        open_driver(described(shutil.copytree(plain, tmp_path / "copy"), {"quant_method": "torchao"}))


def test_they_are_for_the_cpu_alone(open_driver, plain, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    copy = described(shutil.copytree(plain, tmp_path / "copy"), {"quant_method": "compressed-tensors"})
    with pytest.raises(InvalidRequest, match=r"quantized weights.*device='cpu'"):
        open_driver(copy, device="cuda")
