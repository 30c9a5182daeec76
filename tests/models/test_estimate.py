"""How many bytes an engine will hold, known before anything is loaded: by a checkpoint's files, and settings."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from triolet import EngineConfig, InvalidRequest, demo
from triolet.models.blueprints.estimate import ODDS, estimate
from triolet.models.blueprints.passed import PassedComparisons
from triolet.models.checkpoints.gguf_tensors import GgufTensor
from triolet.models.checkpoints.stored import SAMPLE
from triolet.models.executor import TorchExecutor
from triolet.models.memory import budget
from triolet.models.memory.budget import Available, Budget

from ..checkpoints.checkpoints import rewrite
from ..checkpoints.ctranslate2 import convert
from ..checkpoints.drafting import make_drafting
from ..checkpoints.families import make_checkpoint
from ..checkpoints.frame_families import FRAME_MAKERS
from ..checkpoints.gguf_files import tiny, write_gguf
from ..checkpoints.image_families import IMAGE_MAKERS
from .media import SPEECH
from .test_budget import BASE, SMOL
from .test_gguf import MIXED, MODELS
from .test_stored_int8 import compressed
from .towers import TOWERS

_pieces = GgufTensor.pieces
CASES = [
    ("demo", {}),
    ("demo", {"quantization": "int8"}),
    ("demo", {"dtype": "bfloat16", "self_kv_bytes": 1 << 20, "cross_kv_bytes": 10 << 20}),
    ("qwen3", {"dtype": "bfloat16", "max_running": 3, "max_positions": 64}),
    ("llama", {"quantization": "int8", "dtype": "float32"}),
    ("gemma2", {"quantization": "int8"}),
    ("gemma2", {}),
    ("bert", {}),
    ("bert", {"quantization": "int8"}),
    ("bert_classifier", {}),
    ("qwen2_vl", {"quantization": "int8"}),
    ("qwen2_audio", {}),
    ("llava", {}),
    ("qwen3_vl", {}),
    ("gemma3_vision", {}),
    ("gemma4_vision", {}),
    ("gemma4_unified", {"quantization": "int8"}),
    ("qwen3_5", {}),
    *((name, {}) for name in IMAGE_MAKERS),
    ("smolvlm", {"quantization": "int8"}),
    ("qwen3_asr", {"quantization": "int8"}),
    *((name, {}) for name in (*SPEECH, *TOWERS)),
    ("granite_speech", {"quantization": "int8"}),
    ("phi4_multimodal", {"quantization": "int8"}),
    ("voxtral", {"dtype": "bfloat16"}),
    ("voxtral_realtime", {}),
    ("kyutai_speech_to_text", {}),
    ("kyutai_speech_to_text", {"dtype": "bfloat16"}),
    ("vibevoice_asr", {"quantization": "int8"}),
    ("moonshine", {}),
    ("moonshine", {"quantization": "int8"}),
    ("cohere_asr", {"quantization": "int8"}),
    ("nemotron3_diarization", {}),
    ("nemotron3_diarization", {"dtype": "bfloat16"}),
    ("moonshine_streaming", {}),
    ("cohere_asr", {}),
    ("canary", {}),
    ("cohere_asr", {"dtype": "bfloat16"}),
    ("bart", {}),
    ("bart", {"dtype": "bfloat16"}),
    ("t5", {"dtype": "bfloat16"}),
    ("t5", {}),
    ("t5", {"kv_dtype": "float16"}),
    ("llama", {"kv_dtype": "bfloat16", "quantization": "int8"}),
    *((name, {"adapters": 3, "adapter_rank": 40}) for name in ("llama", "qwen3_next", "gpt2")),
    *((name, {"quantization": "int8"}) for name in ("moonshine_streaming", "canary", "parakeet_tdt", "parakeet_ctc")),
    *((name, {"quantization": "int8"}) for name in ("bart", "nemotron3_diarization", "granite_speech5")),
    ("nemotron_asr_streaming", {"quantization": "int8"}),
    *((name, {"quantization": "int4"}) for name in ("demo", "bart", "moonshine_streaming")),
    *((name, {"dtype": dtype, "max_running": 3}) for name in FRAME_MAKERS for dtype in ("float32", "bfloat16")),
]


def held(model: Path, config: EngineConfig) -> dict[str, int]:
    """What an engine's executor holds once it is open. Whether it has compared the model changes nothing of that."""
    executor = TorchExecutor(model, config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PassedComparisons, "once", lambda *_: None)
        executor.open()
    try:
        return executor.memory().by_owner
    finally:
        executor.close()


def test_room_for_draws_of_many_threads_is_thought_of(tmp_path):
    """Each thread has a chance and an id of every token, which a large vocabulary makes more than all else."""
    config = AutoConfig.from_pretrained(make_checkpoint("llama", tmp_path), vocab_size=120_000)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    settings = EngineConfig(device="cpu", threads=16, max_positions=64)
    thought, found = estimate(tmp_path, settings).by_owner["native"], held(tmp_path, settings).get("native", 0)
    assert found <= thought <= found + (4 << 20)


def test_room_for_all_rows_of_an_image_that_see_each_other_is_thought_of(tmp_path):
    folder = make_checkpoint("gemma4_vision", tmp_path)
    rewrite(folder / "preprocessor_config.json", max_soft_tokens=1120)
    settings = EngineConfig(device="cpu", threads=1)
    thought, found = estimate(folder, settings).by_owner["native"], held(folder, settings).get("native", 0)
    assert found <= thought <= found + (4 << 20)


@pytest.mark.parametrize("changes", [{"max_positions": 513}, {"max_positions": 10**6}])
def test_more_positions_than_the_model_has_are_refused_before_anything_is_loaded(folder, changes):
    estimate(folder("qwen2_vl"), EngineConfig(max_positions=512))
    with pytest.raises(InvalidRequest, match=r"=[0-9]+; allowed: up to 512, the positions of Qwen2VL.*, or 0 for all"):
        estimate(folder("qwen2_vl"), EngineConfig(**changes))


@pytest.mark.parametrize(("name", "changes"), CASES)
def test_an_estimate_is_no_less_than_what_is_held_and_hardly_more(folder, name, changes):
    config = EngineConfig(device="cpu", threads=1, **changes)
    model = demo.checkpoint() if name == "demo" else folder(name)
    thought, found = estimate(model, config), held(model, config)
    assert thought.total - thought.by_owner["encoder_outputs"] >= sum(found.values())
    weights = thought.by_owner["weights"] - ODDS
    assert found["weights"] - 10_000 <= weights <= found["weights"] * (1.1 if name in FRAME_MAKERS else 1.06)
    assert thought.by_owner["self_kv"] == found.get("self_kv", 0)
    assert thought.by_owner["cross_kv"] == found.get("cross_kv", 0)
    assert found.get("adapters", 0) <= thought.by_owner["adapters"] <= 2 * found.get("adapters", 0)
    native = found.get("native", 0)
    assert native <= thought.by_owner["native"] <= native + (1 << 20)


def test_slots_of_adapters_are_no_room_for_keys_and_values(folder, monkeypatch):
    """They are allocated after these, of the same free memory."""
    model, plain = folder("llama"), EngineConfig(device="cpu", threads=1, max_running=64)
    config = evolve(plain, adapters=8, adapter_rank=32)
    enough = held(model, config)
    monkeypatch.setattr(budget, "available_memory", lambda read: 16 << 20)
    expected = held(model, plain)["self_kv"]
    assert expected < enough["self_kv"]
    monkeypatch.setattr(budget, "available_memory", lambda read: (16 << 20) + enough["adapters"])
    assert held(model, config)["self_kv"] == expected


@pytest.mark.parametrize("speculation", ["auto", None])
def test_a_draft_head_counts_where_draft_tokens_are_wanted(tmp_path, speculation):
    config = EngineConfig(device="cpu", dtype="float32", threads=1, max_positions=64, speculation=speculation)
    model = make_drafting(tmp_path)
    thought, found = estimate(model, config), held(model, config)
    assert thought.by_owner["draft_kv"] == found.get("draft_kv", 0)
    assert (thought.by_owner["draft_kv"] > 0) == (speculation is not None)
    assert thought.total >= sum(found.values())
    weights = thought.by_owner["weights"] - ODDS
    assert found["weights"] - 10_000 <= weights <= found["weights"] * 1.06
    assert found["native"] <= thought.by_owner["native"]


def test_a_head_that_is_stored_beside_the_embedding_that_it_is_counts_once(folder, tmp_path):
    """transformers leaves it out of what it saves; others do not."""
    model = make_checkpoint("gemma2", tmp_path / "model")
    before = estimate(model, EngineConfig(device="cpu"))
    weights = load_file(model / "model.safetensors")
    save_file({**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}, model / "model.safetensors")
    assert estimate(model, EngineConfig(device="cpu")) == before


def test_weights_that_are_stored_in_int8_count_as_they_are_stored(folder, tmp_path):
    model = tmp_path / "compressed"
    compressed(folder("llama"), model)
    config = EngineConfig(device="cpu", threads=1, dtype="float32")
    thought, found = estimate(model, config), held(model, config)
    assert abs(thought.by_owner["weights"] - ODDS - found["weights"]) < 10_000


@pytest.mark.parametrize(
    ("quantization", "changes"), [("float16", {}), ("int8", {}), ("int8_float16", {"quantization": "int8"})]
)
def test_a_whisper_of_ctranslate2_counts_as_it_is_stored(tmp_path, quantization, changes):
    model = convert(demo.checkpoint(), tmp_path / "ct2", quantization)
    config = EngineConfig(device="cpu", threads=1, dtype="float32", **changes)
    thought, found = estimate(model, config), held(model, config)
    weights = thought.by_owner["weights"] - ODDS
    assert found["weights"] - 10_000 <= weights <= found["weights"] * 1.06


@pytest.mark.parametrize("changes", [{}, {"quantization": "int8"}, {"dtype": "bfloat16"}])
def test_blocks_of_a_gguf_file_count_as_they_are_held_and_none_is_decoded(tmp_path, monkeypatch, changes):
    """Not even the head that is the token embedding."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kinds = {"_norm": "", "attn_q": "Q4_K", "attn_k": "Q5_K", "attn_v": "Q6_K", "ffn_down": "F16", "": "Q8_0"}
    made = tiny("LlamaConfig", "LlamaForCausalLM", tie_word_embeddings=True)
    model, config = write_gguf(tmp_path / "m.gguf", "llama", made, kinds=kinds), EngineConfig(device="cpu", **changes)
    decoded = []
    monkeypatch.setattr(GgufTensor, "pieces", lambda self: decoded.append(self) or _pieces(self))
    thought, found = estimate(model, config), held(model, config)
    weights = thought.by_owner["weights"] - ODDS
    assert found["weights"] - 10_000 <= weights <= found["weights"] * 1.06
    assert {one.name for one in decoded if one.kind != "F32" and prod(one.shape) > SAMPLE} == {
        f"blk.{layer}.ffn_down.weight" for layer in range(2)
    }


@pytest.mark.parametrize(
    ("name", "others"), [("phi3", {}), ("qwen3moe", {}), ("qwen3moe", {"attn_k": "F16", "ffn_gate_exps": "F16"})]
)
def test_a_file_of_blocks_counts_decoded_where_it_is_decoded(tmp_path, monkeypatch, name, others):
    """The library does not compute the positions of the first. Experts stay in blocks, also if gates have another kind
    than what they multiply; no matrix has both blocks and plain numbers."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    architecture, config, model, changes, more = MODELS[name]
    made, kinds = tiny(config, model, **changes), {**MIXED, **others}
    file = write_gguf(tmp_path / "m.gguf", architecture, made, kinds=kinds, more=more)
    thought, found = estimate(file, EngineConfig(device="cpu")), held(file, EngineConfig(device="cpu"))
    assert found["weights"] - 10_000 <= thought.by_owner["weights"] - ODDS <= found["weights"] * 1.06


@given(
    sizes=st.sampled_from([SMOL, BASE]),
    weights=st.integers(0, 1 << 36),
    free=st.integers(1 << 30, 1 << 40),
    running=st.integers(1, 300),
)
def test_with_less_memory_keys_and_values_take_no_more_than_was_thought(sizes, weights, free, running):
    config = EngineConfig(max_running=running)
    thought = Budget.choose(config, sizes, Available.at_most(torch.device("cpu"), weights))
    found = Budget.choose(config, sizes, Available.on_cpu(weights, free))
    assert found.bytes_of(sizes) <= thought.bytes_of(sizes)
