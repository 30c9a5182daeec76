"""GGUF files open as the models that they were made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from torch import nn

from triolet.models.checkpoints.files import resolve
from triolet.models.checkpoints.gguf_file import KINDS, read_gguf
from triolet.models.checkpoints.gguf_tensors import GgufTensor
from triolet.models.checkpoints.loading import load_module
from triolet.models.checkpoints.unread import UnreadTensor, derived
from triolet.models.native.library import Library
from triolet.models.native.parts import PackedEmbedding, PackedLinear

from ..checkpoints.gguf_files import BLOCKS, permuted, random_blocks, tiny, write_gguf
from .texts import Job, generate

LENGTH = {"sliding_window": 8}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "triolet" / "gguf"


def granite(writer: Any, config: Any) -> None:
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)


def gemma(writer: Any, config: Any) -> None:
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    if hasattr(config, "sliding_window"):
        writer.add_sliding_window(config.sliding_window)
    if getattr(config, "attn_logit_softcapping", None):
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def experts(writer: Any, config: Any) -> None:
    writer.add_expert_count(config.num_local_experts if hasattr(config, "num_local_experts") else config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if hasattr(config, "shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)


def llama3(writer: Any, config: Any) -> None:
    """The factors as transformers computes them."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    writer.add_rope_dimension_count(64)
    found = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0]
    plain = 1.0 / (config.rope_parameters["rope_theta"] ** (torch.arange(0, 64, 2) / 64))
    writer.add_tensor("rope_freqs.weight", (plain / found).float().numpy())


def phi3(writer: Any, config: Any) -> None:
    rope = config.rope_parameters
    writer.add_rope_dimension_count(32)
    writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
    writer.add_sliding_window(0)
    for length in ("long", "short"):
        writer.add_tensor(f"rope_factors_{length}.weight", np.asarray(rope[f"{length}_factor"], np.float32))


def yarn(writer: Any, config: Any) -> None:
    writer.add_key_length(config.head_dim)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(config.rope_parameters["factor"])
    writer.add_rope_scaling_orig_ctx_len(config.rope_parameters["original_max_position_embeddings"])


def lfm2(writer: Any, config: Any) -> None:
    writer.add_head_count_kv([2 if kind == "full_attention" else 0 for kind in config.layer_types])
    writer.add_shortconv_l_cache(config.conv_L_cache)


def partial(writer: Any, config: Any) -> None:
    writer.add_rope_dimension_count(16)
    if writer.arch == "stablelm":
        writer.add_parallel_residual(config.use_parallel_residual)


def cohere(writer: Any, config: Any) -> None:
    writer.add_logit_scale(config.logit_scale)
    if writer.arch == "cohere2":
        writer.add_sliding_window(config.sliding_window)


QUARTER = {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25, "rope_type": "default"}}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 5e5,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
    "long_factor": [1.0 + 0.5 * one for one in range(16)],
    "short_factor": [1.0 + one / 8 for one in range(16)],
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e6}
MANY = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "tie_word_embeddings": False}
MODELS: dict[str, tuple[str, str, str, dict[str, Any], Any]] = {
    "llama": ("llama", "LlamaConfig", "LlamaForCausalLM", {"rope_parameters": LLAMA3}, llama3),
    "biased": ("llama", "LlamaConfig", "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}, None),
    "mixtral": ("llama", "MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 4}, experts),
    "qwen2": ("qwen2", "Qwen2Config", "Qwen2ForCausalLM", {"tie_word_embeddings": True}, None),
    "qwen3": ("qwen3", "Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 32, "rope_parameters": YARN}, yarn),
    "qwen2moe": (
        *("qwen2moe", "Qwen2MoeConfig", "Qwen2MoeForCausalLM"),
        {**MANY, "shared_expert_intermediate_size": 96},
        experts,
    ),
    "qwen3moe": (
        *("qwen3moe", "Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
        {**MANY, "head_dim": 32, "norm_topk_prob": True},
        experts,
    ),
    "gemma": ("gemma", "GemmaConfig", "GemmaForCausalLM", {"head_dim": 32}, gemma),
    "gemma2": (
        *("gemma2", "Gemma2Config", "Gemma2ForCausalLM"),
        {"head_dim": 32, "query_pre_attn_scalar": 32, **LENGTH},
        gemma,
    ),
    "gemma3": (
        *("gemma3", "Gemma3TextConfig", "Gemma3ForCausalLM"),
        {"head_dim": 32, "query_pre_attn_scalar": 32, "num_hidden_layers": 6, **LENGTH},
        gemma,
    ),
    "phi3": (
        *("phi3", "Phi3Config", "Phi3ForCausalLM"),
        {"rope_parameters": LONG, "original_max_position_embeddings": 64},
        phi3,
    ),
    "smollm3": ("smollm3", "SmolLM3Config", "SmolLM3ForCausalLM", {"num_hidden_layers": 4}, None),
    "granite": (
        *("granite", "GraniteConfig", "GraniteForCausalLM"),
        {"attention_multiplier": 0.1, "embedding_multiplier": 3.0, "residual_multiplier": 0.22, "logits_scaling": 2.0},
        granite,
    ),
    "olmo2": ("olmo2", "Olmo2Config", "Olmo2ForCausalLM", {}, None),
    "lfm2": (
        *("lfm2", "Lfm2Config", "Lfm2ForCausalLM"),
        {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False, "tie_word_embeddings": False},
        lfm2,
    ),
    "stablelm": ("stablelm", "StableLmConfig", "StableLmForCausalLM", {"use_qkv_bias": True, **QUARTER}, partial),
    "starcoder2": ("starcoder2", "Starcoder2Config", "Starcoder2ForCausalLM", {}, None),
    "command-r": ("command-r", "CohereConfig", "CohereForCausalLM", {"tie_word_embeddings": True}, cohere),
    "cohere2": (
        *("cohere2", "Cohere2Config", "Cohere2ForCausalLM"),
        {"tie_word_embeddings": True, "num_hidden_layers": 4, **LENGTH},
        cohere,
    ),
    "nemotron": ("nemotron", "NemotronConfig", "NemotronForCausalLM", {"head_dim": 64, **QUARTER}, partial),
}


@pytest.mark.parametrize("name", MODELS)
def test_an_architecture_is_the_model_that_was_converted(name, tmp_path):
    """Its names are those that the package gguf has for transformers' names. All weights and logits are the same."""
    architecture, config, model, changes, more = MODELS[name]
    made = tiny(config, model, **changes)
    path = write_gguf(tmp_path / "m.gguf", architecture, made, more=more or (lambda writer, config: None))
    found = load_module(model, resolve(path), torch.float32)
    weights = found.state_dict()
    for key, weight in made.state_dict().items():
        assert torch.allclose(weights[key], weight, atol=1e-6, rtol=0), key
    tokens = torch.arange(3, 40)[None]
    with torch.inference_mode():
        assert torch.allclose(found(tokens).logits, made(tokens).logits, atol=2e-4)


MIXED = {
    "_norm": "",
    ".bias": "",
    "ffn_gate_inp": "",
    "attn_q": "Q4_K",
    "attn_k": "Q5_K",
    "attn_v": "Q6_K",
    "attn_output": "IQ4_XS",
    "ffn_gate_exps": "Q4_0",
    "ffn_up_exps": "Q5_0",
    "ffn_gate": "IQ4_NL",
    "ffn_up": "MXFP4",
    "ffn_down": "Q5_1",
    "token_embd": "Q8_0",
}


@pytest.mark.parametrize("name", ["biased", "gemma3", "qwen3moe"])
def test_the_engine_writes_the_tokens_of_the_decoded_weights(name, tmp_path, open_driver):
    """Of blocks of many kinds in one file. Alone and together."""
    architecture, config, model, changes, more = MODELS[name]
    made = tiny(config, model, **changes)
    more = more or (lambda writer, config: None)
    path = write_gguf(tmp_path / "m.gguf", architecture, made, kinds=MIXED, more=more)
    driver = open_driver(path, dtype="float32")
    assert "whole" not in vars(driver.description.tokenizer), "opening makes the tokenizer, which takes long"
    jobs = [Job(prompt=tuple(range(4, 4 + length)), max_tokens=8) for length in (3, 17, 30)]
    together = [one.tokens for one in driver.run(*jobs)]
    assert together == [generate(made, job.prompt, job.max_tokens) for job in jobs]
    assert together[1] == driver.run(jobs[1])[0].tokens


@pytest.mark.skipif(Library.load() is None, reason="installed without a compiler")
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("name", ["biased", "gemma3", "qwen3moe"])
def test_blocks_stay_as_they_are(name, quantization, tmp_path, open_driver):
    """Every matrix: also those of kinds that lie together, of experts whose gates have another kind than what they
    multiply, of words; and no number is decoded to be kept. In int8 inputs have 8 bits, the weights are the same."""
    architecture, config, model, changes, more = MODELS[name]
    made, kinds = tiny(config, model, **changes), {**MIXED, "output": "Q6_K"}
    path = write_gguf(tmp_path / "m.gguf", architecture, made, kinds=kinds, more=more or (lambda writer, config: None))
    driver = open_driver(path, dtype="float32", quantization=quantization)
    module = driver.executor._open.parts.model.module
    packed = {name: one for name, one in module.named_modules() if isinstance(one, PackedLinear | PackedEmbedding)}
    assert [name for name, one in packed.items() if not one.sections] == []
    assert {one.planes for one in packed.values()} == {2 if quantization is None else 1}
    assert {len(one.sections) for one in packed.values()} >= {1, 3}
    assert not any(type(one) in {nn.Linear, nn.Embedding} for one in module.modules())
    del module, packed


def stored(tmp_path: Path, kind: str, rows: int = 12, width: int = 512) -> tuple[GgufTensor, np.ndarray[Any, Any]]:
    """A matrix of random blocks in a file, and the blocks."""
    blocks = random_blocks(kind, rows, width)
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tensor("before", np.ones(7, np.float32))
    writer.add_tensor("matrix", blocks, raw_dtype=Kind[kind])
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
    return GgufTensor.placed("matrix", read_gguf(tmp_path / "t.gguf").tensors["matrix"], lazily=True), blocks


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_decoded_as_the_package_gguf_decodes_it(kind, tmp_path, monkeypatch):
    """Bit for bit: as a whole, in small pieces, in parts that begin and end anywhere."""
    tensor, blocks = stored(tmp_path, kind)
    expected = torch.from_numpy(dequantize(blocks, Kind[kind]))
    monkeypatch.setattr("triolet.models.checkpoints.gguf_tensors._PIECE", 1024)
    assert tensor.shape == (12, 512)
    assert torch.equal(tensor.read(torch.float32), expected)
    assert torch.equal(tensor.cut(700, (3, 100)).read(torch.float32), expected.flatten()[700:1000].view(3, 100))
    assert torch.equal(tensor.part(5).read(torch.float32), expected[5])
    assert next(iter(tensor.sample())).numel() == 256
    unread = tensor.to(dtype=torch.float32)
    assert isinstance(unread, UnreadTensor)
    assert torch.equal(unread.read_rows(3, 7), expected[3:7])
    if kind in BLOCKS:
        assert unread.block_kind == kind
        assert torch.equal(unread.blocks_of(3, 7), torch.from_numpy(blocks[3:7]))
        assert torch.equal(unread.blocks_of(10, 99), torch.from_numpy(blocks[10:]))
        assert tensor.cut(256, (2, 512)).block_kind is None
        assert torch.equal(unread + 1, expected + 1)
        assert unread.block_kind is None
    else:
        assert unread.block_kind is None


def test_rows_that_the_converter_moved_are_moved_back_with_their_blocks(tmp_path):
    tensor, blocks = stored(tmp_path, "Q4_K", rows=16)
    from triolet.models.checkpoints.gguf_tensors import _turned_back

    turned = _turned_back(tensor, 2)
    values = turned.read(torch.float32)
    assert torch.equal(permuted(values, 2), torch.from_numpy(dequantize(blocks, Kind.Q4_K)))
    assert turned.blocks(4, 4).shape == tensor.blocks(4, 2).shape == (0, 288)
    for start, stop in ((0, 16), (3, 5), (7, 9), (15, 16)):
        found = dequantize(turned.blocks(start, stop).numpy(), Kind.Q4_K)
        assert torch.equal(torch.from_numpy(found), values[start:stop])


def test_joins_have_blocks_where_rows_of_one_kind_are_joined(tmp_path, monkeypatch):
    for name, kind in (("a", "Q4_K"), ("b", "Q4_K"), ("c", "Q6_K")):
        (tmp_path / name).mkdir()
        tensor, blocks = stored(tmp_path / name, kind)
        globals()[f"_{name}"] = tensor.to(dtype=torch.float32), blocks
    (a, of_a), (b, of_b), (c, _) = (globals().pop(f"_{name}") for name in "abc")
    joined = torch.cat([a, b])
    assert joined.block_kind == "Q4_K"
    assert np.array_equal(joined.blocks_of(7, 20).numpy(), np.concatenate([of_a, of_b])[7:20])
    order = torch.tensor([*range(12, 18), *range(6), *range(18, 24), *range(6, 12)])
    moved, read = derived(joined, lambda rows: rows[order], order), list[int]()
    whole = GgufTensor._bytes
    monkeypatch.setattr(GgufTensor, "_bytes", lambda *told: (read.append(told[2] - told[1]), whole(*told))[1])
    assert np.array_equal(moved.blocks_of(3, 15).numpy(), np.concatenate([of_a, of_b])[order][3:15])
    assert read == [3, 6, 3], "rows that nobody asked for"
    assert moved.blocks_of(4, 4).shape == (0, of_a.shape[1])
    assert torch.cat([a, c]).block_kind is None
    assert torch.cat([a, b], 1).block_kind is None
    experts = torch.cat([torch.stack([a, b]), torch.stack([b, a])], 1)
    assert experts.block_kind is None
    assert experts.unread_part(1).block_kind == "Q4_K"
    assert np.array_equal(experts.unread_part(1).blocks_of(10, 14).numpy(), np.concatenate([of_b, of_a])[10:14])
