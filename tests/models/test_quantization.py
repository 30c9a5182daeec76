"""Models in int8: they compute what transformers computes of the weights that int8 holds, and little else is kept."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from triolet.core.request import Pooling
from triolet.models.linear.modules import QuantizedEmbedding, QuantizedLinear, quantize, quantize_modules
from triolet.models.machine.devices import computes_in_bfloat16
from triolet.models.native.library import Library

from ..checkpoints.families import make_checkpoint
from .conftest import small_config
from .texts import Job, generate, noise

FAMILIES = ("llama", "gemma3")


def matrices(model):
    """The weights that int8 holds: of plain linear layers and token embeddings, each once."""
    others = {id(one) for each in model.modules() if type(each) not in {nn.Linear, nn.Embedding} for one in own(each)}
    found = {}
    for name, module in model.named_modules():
        if type(module) in {nn.Linear, nn.Embedding} and not name.endswith("encoder.embed_positions"):
            found[id(module.weight)] = module
    return [module for identity, module in found.items() if identity not in others]


def own(module):
    return module.parameters(recurse=False)


def rounded(model):
    """A copy of a model of transformers with the weights that int8 holds."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for module in matrices(model):
            weight, scales = quantize(module.weight, torch.float32)
            module.weight.copy_(weight.float() * scales[:, None])
    return model


@pytest.fixture
def exactly(monkeypatch):
    """Layers compute what their weights say: their inputs stay as they are."""
    monkeypatch.setattr(QuantizedLinear, "exact", True)


def weight_bytes(executor):
    return executor.memory().by_owner["weights"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_decoder_in_int8_is_transformers_with_the_rounded_weights(
    open_driver, folder, family, without_native, exactly
):
    """Token for token, for prompts in chunks and side by side."""
    driver = open_driver(folder(family), quantization="int8")
    jobs = [Job(prompt=noise(length, length), chunk=7, joins=length % 4) for length in (3, 19, 40)]
    found = driver.run(*jobs)
    reference = rounded(AutoModelForCausalLM.from_pretrained(folder(family), dtype=torch.float32).eval())
    assert [one.tokens for one in found] == [generate(reference, job.prompt, job.max_tokens) for job in jobs]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_whisper_in_int8_is_transformers_with_the_rounded_weights(
    open_driver, checkpoint, reference, features, job, audio, ids, dtype, without_native, exactly
):
    """The encoder's output, and the log-probabilities of what is written."""
    driver = open_driver(checkpoint, quantization="int8", dtype=dtype)
    driver.encode(a=audio(1))
    model = rounded(reference)
    with torch.inference_mode():
        expected = model.model.encoder(features(audio(1))).last_hidden_state[0]
    found = driver.executor._open.outputs.get("a").float()
    assert float((found - expected).abs().max()) <= (1e-4 if dtype == "float32" else 0.1 * float(expected.abs().max()))
    if dtype == "float32":
        prompt = (ids.start, ids.en, ids.transcribe, ids.no_timestamps)
        outcome = driver.run(job(key="a", prompt=prompt, max_tokens=12, chunk=3))[0]
        with torch.inference_mode():
            fed = torch.tensor([[*prompt, *outcome.tokens[:-1]]])
            logits = model(features(audio(1)), decoder_input_ids=fed).logits[0, len(prompt) - 1 :].log_softmax(-1)
        told = [float(row[token]) for row, token in zip(logits, outcome.tokens, strict=True)]
        assert outcome.logprobs == pytest.approx(told, abs=1e-3)


def test_an_encoder_in_int8_says_nearly_the_same(open_driver, folder, monkeypatch, without_native):
    pooling, vectors = Pooling(kind="mean", normalize=True), {}
    for quantization in (None, "int8"):
        driver = open_driver(folder("bert"), quantization=quantization)
        job = Job(prompt=noise(23, 5), pooling=pooling)
        vectors[quantization] = torch.tensor(driver.run(job)[0].vector)
    assert float(vectors[None] @ vectors["int8"]) > 0.99
    model = rounded(AutoModel.from_pretrained(folder("bert"), dtype=torch.float32).eval())
    with torch.inference_mode():
        hidden = model(torch.tensor([job.prompt])).last_hidden_state[0].mean(0)
    monkeypatch.setattr(QuantizedLinear, "exact", True)
    again = driver.run(job)[0].vector
    assert again == pytest.approx((hidden / hidden.norm()).tolist(), abs=1e-4)


def test_a_classifier_in_int8_says_nearly_the_same(open_driver, tmp_path, without_native, exactly):
    """The head, too, is given floats."""
    config = AutoConfig.from_pretrained(make_checkpoint("llama", tmp_path / "llama"), num_labels=3, pad_token_id=0)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    model.save_pretrained(tmp_path / "llama")
    job = Job(prompt=noise(23, 5), pooling=Pooling(kind="classify"))
    driver = open_driver(tmp_path / "llama", quantization="int8")
    found = driver.run(job)[0].vector
    with torch.inference_mode():
        expected = rounded(model)(torch.tensor([job.prompt])).logits[0]
    assert found == pytest.approx(expected.tolist(), abs=1e-4)


def test_the_head_of_a_model_that_sees_is_quantized_with_its_embedding(open_driver, folder, without_native):
    """Though it lies outside of the part that is a decoder; what encodes stays as it is."""
    module = open_driver(folder("qwen2_vl"), quantization="int8").executor._open.parts.model.module
    head, embedding = module.get_output_embeddings(), module.get_input_embeddings()
    assert isinstance(head, QuantizedLinear)
    assert isinstance(embedding, QuantizedEmbedding)
    if module.config.tie_word_embeddings:
        assert head.weight.data_ptr() == embedding.weight.data_ptr()
    assert not any(isinstance(each, QuantizedLinear) for each in module.model.visual.modules())


class Doubling(nn.Linear):
    """A router or the like: a linear layer that computes something else."""

    def forward(self, inputs):
        return 2 * super().forward(inputs)


def test_a_linear_layer_of_another_kind_is_left_alone():
    module = nn.Sequential(nn.Linear(64, 32), Doubling(64, 32))
    other = module[1]
    quantize_modules(module, module)
    assert isinstance(module[0], QuantizedLinear)
    assert module[1] is other


@pytest.mark.skipif(Library.load() is None, reason="installed without a compiler")
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_weights_are_held_once(open_driver, folder, family, quantization):
    """Matrices filled up to whole panels of outputs, in int8 to whole groups of inputs too; all else as it is."""
    model = AutoModelForCausalLM.from_pretrained(folder(family), dtype=torch.float32)
    decoder, config = model.base_model, model.config
    held = (*model.named_parameters(), *model.named_buffers())
    others = sum(one.nbytes for name, one in held if one.dim() < 2 and not name.endswith("embed_scale"))
    attention, hidden, inner = decoder.layers[0].self_attn, config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    size, layers = attention.head_dim, config.num_hidden_layers
    stacked = [((heads + 2 * kv_heads) * size, hidden), (hidden, heads * size), (2 * inner, hidden), (hidden, inner)]
    tables = 1 if model.lm_head.weight is decoder.embed_tokens.weight else 2
    shapes = [*stacked * layers, *[(config.vocab_size, hidden)] * tables]
    executor = open_driver(folder(family), quantization=quantization).executor
    assert weight_bytes(executor) == others + sum(packed_bytes(*shape, int8=bool(quantization)) for shape in shapes)


def packed_bytes(outputs, inputs, *, int8):
    panels = -(-outputs // 32)
    return panels * -(-inputs // 32) * (64 + 32 * 32) if int8 else panels * 32 * inputs * 4


def test_outputs_of_quantized_encoders_are_not_taken_for_others(open_driver, checkpoint):
    """Their content keys differ."""
    plain, quantized = (open_driver(checkpoint, quantization=one).description for one in (None, "int8"))
    assert plain.processor_identity != quantized.processor_identity


def test_what_is_computed_in_is_chosen_by_the_cpu(open_driver, folder):
    driver = open_driver(folder("llama"), quantization="int8", dtype="auto")
    expected = "bfloat16" if computes_in_bfloat16() and Library.load() is None else "float32"
    assert driver.description.dtype == expected
    assert open_driver(folder("llama"), dtype="auto").description.dtype == "float32"


@pytest.mark.parametrize("family", ["bart", "t5", "nemotron3_diarization"])
def test_what_is_linear_is_held_in_int8_by_torch(opens, tmp_path, without_native, family):
    """And nothing else: T5 adds numbers to its scores, which an embedding has."""
    executor, _ = opens(make_checkpoint(family, tmp_path), small_config(quantization="int8"))
    modules = dict(executor._open.parts.model.module.named_modules())
    assert any(isinstance(one, QuantizedLinear) for one in modules.values())
    left = [name for name, one in modules.items() if type(one) in {nn.Linear, nn.Embedding}]
    assert all(name.endswith("relative_attention_bias") for name in left)
    assert len(left) == 2 * (family == "t5")


@pytest.mark.skipif(Library.load() is None, reason="installed without a compiler")
def test_an_encoder_decoder_with_distances_is_computed_in_int8_by_the_library(opens, tmp_path):
    executor, _ = opens(make_checkpoint("t5", tmp_path, seed=1), small_config(quantization="int8"))
    assert executor._open.parts.network.native is not None
    assert not any(type(one) is nn.Linear for one in executor._open.parts.model.module.modules())
