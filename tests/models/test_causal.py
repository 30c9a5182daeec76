"""Decoder-only models: what the executor draws is what transformers' own ``generate`` draws, and what is refused. The
families that are known by name are compared through the whole engine, in ``tests/api/test_families.py``."""

from __future__ import annotations

import copy
import functools
import shutil

import pytest
import torch
from attrs import evolve
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoModelForCausalLM, GenerationConfig

from triolet.core.errors import CheckpointError, EncodeFailed, UnsupportedModel
from triolet.core.model import Kind
from triolet.core.request import EncoderItem, Probe
from triolet.models.blueprints.estimate import ODDS, estimate
from triolet.models.blueprints.passed import PassedComparisons
from triolet.models.checkpoints.stored import StoredTensor
from triolet.models.native.decoders import MODEL_TYPES
from triolet.models.native.library import Library
from triolet.models.native.panels import Panels
from triolet.models.native.program import Program

from ..checkpoints.checkpoints import rewrite
from .test_stored_int8 import packed
from .texts import Job, generate, noise

LENGTHS = (1, 5, 23, 40, 70)  # the window of mistral is 16


@pytest.fixture(scope="session")
def reference(folder):
    """``reference(family)``: transformers' own model of the checkpoint."""

    @functools.cache
    def load(family):
        return AutoModelForCausalLM.from_pretrained(folder(family), dtype=torch.float32).eval()

    return load


# -- the same tokens ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 64])
def test_page_sizes_change_no_token(start, reference, page_size):
    """One position a page, more than a prompt."""
    driver = start("mistral", page_size=page_size)
    jobs = [Job(prompt=noise(length, length), chunk=13, max_tokens=6) for length in LENGTHS]
    results = driver.run(*jobs)
    assert [result.tokens for result in results] == [generate(reference("mistral"), job.prompt, 6) for job in jobs]


def test_a_probe_is_answered_from_its_position(start, reference):
    """In the middle of a chunk, and at the sampled row."""
    driver, prompt = start("llama"), noise(20, 3)
    jobs = [Job(prompt=prompt, probe=Probe(position=at, token_ids=(5, 9)), chunk=8, max_tokens=1) for at in (3, 19)]
    told = [result.probes for result in driver.run(*jobs)]
    expected = reference("llama")(torch.tensor([prompt])).logits[0].log_softmax(-1)
    for probes, at in zip(told, (3, 19), strict=True):
        assert probes[0] == pytest.approx(expected[at, [5, 9]].tolist(), abs=1e-4)
        assert len(probes) == 1


# -- images and audio --------------------------------------------------------------------------------------------------


def test_an_item_that_is_not_resident_is_our_bug(open_driver, opened):
    """Only where a chunk touches it: text before it is read without."""
    checkpoint = opened("llava")
    driver = open_driver(checkpoint.folder)
    prepared = driver.description.preparer.prepare(f"Some text {checkpoint.placeholder}", images=checkpoint.items(0))
    (placeholder,) = (item.placeholder for item in prepared.items)
    before = Job(prompt=prepared.token_ids[: placeholder.start], placeholders=(placeholder,), max_tokens=1)
    assert driver.run(before)[0].tokens
    with pytest.raises(AssertionError, match="is read but not resident"):
        driver.run(Job(prompt=prepared.token_ids, placeholders=(placeholder,)))


def test_an_encoding_that_is_not_finite_is_refused(open_driver, opened):
    """And nothing of its batch is kept."""
    checkpoint = opened("llava")
    executor = open_driver(checkpoint.folder).executor
    prepared = checkpoint.prepare(checkpoint.placeholder, checkpoint.items(0))
    (item,) = prepared.items
    broken = {"pixel_values": torch.full_like(item.payload["pixel_values"], torch.nan)}
    with pytest.raises(EncodeFailed, match="not finite"):
        executor.encode((EncoderItem(key="a", payload=broken, embeddings=item.embeddings, size=item.size),))
    assert executor.memory().by_owner["encoder_outputs"] == 0


# -- memory ------------------------------------------------------------------------------------------------------------


def test_a_model_on_another_device_shares_what_is_shared(start):
    """The head that is the embedding stays one tensor."""
    model = start("gemma2").executor._open.parts.model
    moved = model.to(torch.device("meta"))
    assert all(tensor.is_meta for tensor in moved.tensors())
    head = moved.module.lm_head
    assert getattr(head, "packed", head.weight) is moved.module.model.embed_tokens.weight
    assert len({id(tensor) for tensor in moved.tensors()}) == len({id(tensor) for tensor in model.tensors()})


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, "quantized"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quantized by mxfp4"),
        ({"attention_chunk_size": 8}, "chunks of 8 positions"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ({"sliding_window": 16}, "with window=None, but config.json says 16"),
        ({"architectures": ["LlamaForTokenClassification"]}, "LlamaForTokenClassification"),
        ({"architectures": ["BertForMaskedLM"]}, "BertForMaskedLM"),
        ({"model_type": "nothing"}, "'nothing'"),
        ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, "mamba"),
    ],
    ids=str,
)
def test_what_our_attention_does_not_do_is_refused(open_driver, changed, settings, told):
    """With a sentence."""
    with pytest.raises(UnsupportedModel, match=told) as caught:
        open_driver(changed("llama", **settings))
    assert "allowed" in str(caught.value)


def test_code_of_a_checkpoint_is_never_run(open_driver, changed, monkeypatch):
    """Nor does anybody ask at the terminal whether it may be."""
    own = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
    copy = changed("llama", "tokenizer_config.json", **own)
    (copy / "own.py").write_text("raise SystemExit('it was run')\n")
    monkeypatch.setattr("builtins.input", lambda _: "y")
    with pytest.raises(UnsupportedModel, match="code in the checkpoint, which is never run"):
        open_driver(copy)


def tiny(folder, model, tokenizer_of):
    model.save_pretrained(folder)
    for path in tokenizer_of.glob("tokenizer*"):
        shutil.copy(path, folder)
    return folder


def make_others():
    """Models whose attention is not only ours: a mask of its own, a bias by distance."""
    import transformers as t

    return {
        "bloom": lambda: t.BloomForCausalLM(t.BloomConfig(vocab_size=300, hidden_size=32, n_layer=2, n_head=4)),
        "t5": lambda: t.T5ForConditionalGeneration(t.T5Config(vocab_size=300, d_model=32, d_kv=8, d_ff=32)),
        "mamba": lambda: t.MambaForCausalLM(t.MambaConfig(vocab_size=300, hidden_size=32, num_hidden_layers=2)),
    }


@pytest.mark.parametrize("kind", make_others())
def test_other_kinds_of_attention_are_refused(open_driver, folder, tmp_path, kind):
    """A bias by distance, cross-attention, no attention at all."""
    torch.manual_seed(0)
    other = tiny(tmp_path, make_others()[kind](), folder("llama"))
    with pytest.raises(UnsupportedModel, match="allowed"):
        open_driver(other)


@functools.cache  # of all, which takes longer than to make one model
def make_more():
    """Models of families that have no checkpoint of their own in the tests."""
    import transformers as t

    sizes = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {**sizes, "intermediate_size": 64, "max_position_embeddings": 128, "num_key_value_heads": 2}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 299}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    local = {"num_local_experts": 4, "num_experts_per_tok": 2}
    sliding = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
    latent = {"num_key_value_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8}
    latent = {**more, **ends, **latent, "v_head_dim": 12}
    gemma4 = {
        **more,
        **ends,
        **sliding,
        "num_hidden_layers": 4,
        "layer_types": 2 * sliding["layer_types"],
        "head_dim": 8,
    }
    gemma4 |= {"global_head_dim": 16, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8}
    gemma4 |= {"vocab_size_per_layer_input": 300}
    routed = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    kinds = {
        "deepseek_v2": t.DeepseekV2Config(
            **latent, **routed, q_lora_rank=None, first_k_dense_replace=1, n_shared_experts=1, topk_method="greedy"
        ),
        "deepseek_v3": t.DeepseekV3Config(
            **{**latent, **routed, "n_routed_experts": 8}, n_group=4, topk_group=2, first_k_dense_replace=0
        ),
        "glm4_moe_lite": t.Glm4MoeLiteConfig(**latent, **routed, q_lora_rank=16),
        "minicpm3": t.MiniCPM3Config(**latent, q_lora_rank=16, dim_model_base=16),
        "youtu": t.YoutuConfig(**latent, q_lora_rank=16),
        "granite_swa": t.GraniteSWAConfig(**more, **ends, **sliding, layer_rope_theta=[0, 1e4]),
        "granitemoe_swa": t.GraniteMoeSWAConfig(**more, **ends, **sliding, **local),
        "gemma3n_text": t.Gemma3nTextConfig(
            **{**gemma4, "intermediate_size": [64] * 4}, activation_sparsity_pattern=[0.0] * 4, laurel_rank=8
        ),
        "gemma4": t.Gemma4Config(text_config=gemma4, vision_config=None, audio_config=None),
        "gemma4_text": t.Gemma4TextConfig(**gemma4),
        "gpt_oss": t.GptOssConfig(**more, **ends, **sliding, **local, head_dim=8),
        "phi3": t.Phi3Config(**more, **ends),
        "qwen2": t.Qwen2Config(**more),
        "qwen3_moe": t.Qwen3MoeConfig(**more, **experts, head_dim=8),
        "qwen2_moe": t.Qwen2MoeConfig(**more, **experts, shared_expert_intermediate_size=64, mlp_only_layers=[1]),
        "mixtral": t.MixtralConfig(**more, **local),
        "olmoe": t.OlmoeConfig(**more, **ends, num_experts=4, num_experts_per_tok=2),
        "granitemoe": t.GraniteMoeConfig(**more, **ends, **local, residual_multiplier=0.5),
        "granitemoeshared": t.GraniteMoeSharedConfig(**more, **ends, **local, shared_intermediate_size=32),
        "glm4_moe": t.Glm4MoeConfig(
            **more, **ends, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, first_k_dense_replace=0
        ),
        "dots1": t.Dots1Config(
            **{**more, "num_key_value_heads": 4},
            **ends,
            n_routed_experts=4,
            n_shared_experts=1,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            first_k_dense_replace=1,
            norm_topk_prob=True,
        ),
        "ernie4_5_moe": t.Ernie4_5_MoeConfig(
            **more, **ends, moe_num_experts=4, moe_k=2, moe_intermediate_size=32, moe_layer_start_index=1
        ),
        "granite": t.GraniteConfig(
            **more, logits_scaling=2.0, residual_multiplier=0.5, embedding_multiplier=6.0, attention_multiplier=0.5
        ),
        "olmo2": t.Olmo2Config(**more),
        "olmo3": t.Olmo3Config(**more, **ends, **sliding),
        "cohere": t.CohereConfig(**more),
        "smollm3": t.SmolLM3Config(**more, pad_token_id=0),
        "gemma": t.GemmaConfig(**more, **ends, head_dim=8),
        "helium": t.HeliumConfig(**more, **ends, head_dim=8),
        "seed_oss": t.SeedOssConfig(**more, **ends, head_dim=8),
        "ernie4_5": t.Ernie4_5Config(**more, **ends, head_dim=8),
        "ministral3": t.Ministral3Config(
            **more,
            **ends,
            head_dim=8,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e4,
                "llama_4_scaling_beta": 0.5,
                "original_max_position_embeddings": 16,
            },
        ),
        "exaone4": t.Exaone4Config(**more, **ends, **sliding, head_dim=8),
        "glm": t.GlmConfig(**more, **ends, head_dim=8),
        "glm4": t.Glm4Config(**more, **ends, head_dim=8),
        "starcoder2": t.Starcoder2Config(**more, **ends, sliding_window=16),
        "cohere2": t.Cohere2Config(**more, **ends, **sliding, logit_scale=0.5),
        "phi": t.PhiConfig(**more, **ends),
        "gpt_neox": t.GPTNeoXConfig(**{**more, "num_key_value_heads": 4}, **ends),
        "gpt2": t.GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=4, n_positions=128),
        "opt": t.OPTConfig(**sizes, **ends, ffn_dim=64, word_embed_proj_dim=32, max_position_embeddings=128),
    }
    made = t.AutoModelForCausalLM.from_config
    return {name: lambda config=config: made(copy.deepcopy(config)) for name, config in kinds.items()}


@pytest.mark.parametrize("kind", make_more())
def test_architectures_without_a_line_of_their_own(open_driver, config, folder, tmp_path, kind):
    """Whatever honours transformers' attention interface runs, with its tokens; the native library computes those that
    it knows, whatever their batches and chunks."""
    torch.manual_seed(0)
    model = make_more()[kind]().eval()
    with torch.no_grad():
        for name, weights in (*model.named_parameters(), *model.named_buffers()):
            if weights.dim() > 1 or name.endswith(("correction_bias", "sinks")):
                weights.normal_(0.0, 1.5 / weights.shape[-1] ** 0.5)
    model.generation_config = GenerationConfig(eos_token_id=299, pad_token_id=0)
    driver = open_driver(tiny(tmp_path, model, folder("llama")))
    if Library.load() is not None:
        known = model.config.get_text_config().model_type in MODEL_TYPES
        assert (driver.executor._open.parts.network.native is not None) == known
    thought, found = estimate(tmp_path, config()).by_owner, driver.executor.memory().by_owner
    assert found["weights"] - 10_000 <= thought["weights"] - ODDS
    assert found.get("native", 0) <= thought["native"]
    jobs = [Job(prompt=noise(length, length), chunk=7, max_tokens=8) for length in (1, 9, 30)]
    results = driver.run(*jobs)
    assert [result.tokens for result in results] == [generate(model, job.prompt, 8) for job in jobs]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("qwen2_moe", "float32"),
        ("granitemoe", "float32"),
        ("gpt_oss", "float32"),
        ("qwen3_moe", "bfloat16"),
        ("qwen3_moe", "float16"),
    ],
)
def test_an_estimate_knows_which_experts_are_quantized(open_driver, config, folder, tmp_path, kind, dtype):
    """The native library's are. For torch, all experts of a layer are one tensor, which is no linear layer."""
    model = make_more()[kind]()
    model.generation_config = GenerationConfig(eos_token_id=299, pad_token_id=0)
    tiny(tmp_path, model, folder("llama"))
    settings = {"quantization": "int8", "dtype": dtype}
    found, thought = (
        open_driver(tmp_path, **settings).executor.memory().by_owner,
        estimate(tmp_path, config(**settings)).by_owner,
    )
    assert found["weights"] - 10_000 <= thought["weights"] - ODDS <= found["weights"] * 1.1
    assert found.get("native", 0) <= thought["native"] <= found.get("native", 1 << 30) + (1 << 20)


@pytest.mark.skipif(Library.load() is None, reason="installed without a compiler")
def test_an_estimate_counts_the_operations_of_a_deep_model(open_driver, config, folder, tmp_path):
    from transformers import MixtralConfig

    sizes = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 60}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    made = AutoModelForCausalLM.from_config(MixtralConfig(**sizes, num_local_experts=2, num_experts_per_tok=1))
    found = open_driver(tiny(tmp_path, made, folder("llama"))).executor.memory().by_owner["native"]
    assert 60 * 9 * 8_000 < found <= estimate(tmp_path, config()).by_owner["native"] <= 1.4 * found


@pytest.mark.skipif(Library.load() is None, reason="installed without a compiler")
@pytest.mark.parametrize("kind", ["mixtral", "glm4_moe", "dots1", "gpt_oss"])
def test_experts_are_computed_in_bfloat16_though_they_are_weighed_in_float32(open_driver, folder, tmp_path, kind):
    """As by transformers, with which the library is compared."""
    driver = open_driver(tiny(tmp_path, make_more()[kind](), folder("llama")), dtype="bfloat16")
    assert driver.executor._open.parts.network.native is not None
    (result,) = driver.run(Job(prompt=noise(9, 9), max_tokens=4))
    assert len(result.tokens) == 4


@pytest.mark.parametrize(("kind", "quantization"), [("qwen3_moe", None), ("qwen3_moe", "int8"), ("llama", None)])
def test_matrices_that_are_stored_packed_count_as_they_are_held(
    open_driver, config, folder, tmp_path, kind, quantization
):
    """Experts as transformers unpacks them, or in int8 as the native library holds them."""
    plain = folder("llama") if kind == "llama" else tiny(tmp_path / "plain", make_more()[kind](), folder("llama"))
    packed(plain, tmp_path / "packed")
    settings = {"quantization": quantization}
    found = open_driver(tmp_path / "packed", **settings).executor.memory().by_owner["weights"]
    thought = estimate(tmp_path / "packed", config(**settings)).by_owner["weights"] - ODDS
    assert found - 10_000 <= thought <= found * 1.1


@pytest.mark.parametrize("settings", [{}, {"quantization": "int8"}])
def test_experts_that_are_weighed_otherwise_are_refused(open_driver, folder, tmp_path, monkeypatch, settings):
    model = make_more()["qwen2_moe"]()
    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj.mul_(30.0)
    tiny(tmp_path, model, folder("llama"))
    open_driver(tmp_path, **settings)
    route = Program.route
    monkeypatch.setattr(Program, "route", lambda *given, **told: route(*given, **{**told, "together": True}))
    with pytest.raises(UnsupportedModel, match="other numbers by the native library than by transformers"):
        open_driver(tmp_path, **settings)


@pytest.mark.skipif(Library.load() is None, reason="installed without a compiler")
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_weights_are_read_when_they_are_packed(open_driver, folder, tmp_path, monkeypatch, quantization):
    """One expert after the other, and no longer held as they were read."""
    read, seen, most = StoredTensor.read, {}, []

    def noted(*told):
        made = read(*told)
        seen[made.data_ptr()] = StorageWeakRef(made.untyped_storage()), made.nbytes
        most.append(sum(count for one, count in seen.values() if not one.expired()))
        return made

    model = make_more()["mixtral"]()
    tiny(tmp_path, model.to(torch.bfloat16), folder("llama"))
    monkeypatch.setattr(StoredTensor, "read", noted)
    open_driver(tmp_path, quantization=quantization)
    words = 4 * model.lm_head.weight.numel()
    assert max(most) <= 2.1 * words, "no more than the embeddings, and the head"
    assert 4 * sum(weight.numel() for weight in model.parameters()) > 6 * words


def of_swapped(weights):
    return weights[[0, 2, 1, 3]]


def with_gate_and_value_swapped(weights):
    if weights.shape[1] > weights.shape[2]:
        weights[3] = weights[3].roll(len(weights[3]) // 2, 0)
    return weights


def with_scales_of_neighbours(panels):
    scales = panels._scales[: len(panels.packed) // 4]
    scales.copy_(scales.roll(1, -1))
    return panels


@pytest.mark.skipif(Library.load() is None, reason="installed without a compiler")
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize(
    ("before", "behind"),
    [(of_swapped, None), (with_gate_and_value_swapped, None), (None, with_scales_of_neighbours)],
    ids=["two experts swapped", "gate and value swapped", "scales shifted"],
)
def test_an_expert_that_is_packed_wrongly_is_refused(open_driver, folder, tmp_path, monkeypatch, kind, before, behind):
    """Both what is computed natively and what torch computes of packed experts are wrong alike then; and whether rows
    ask for the expert at all depends on the model."""
    torch.manual_seed(0)
    pack = Panels.of_each

    def packed(weights, **told):
        panels = pack(weights if before is None else before(weights.clone()), **told)
        return panels if behind is None else behind(panels)

    tiny(tmp_path, make_more()[kind](), folder("llama"))
    open_driver(tmp_path, quantization="int8")
    monkeypatch.setattr(Panels, "of_each", packed)
    with pytest.raises(UnsupportedModel, match="other numbers by the native library"):
        open_driver(tmp_path, quantization="int8")


@pytest.mark.skipif(Library.load() is None, reason="installed without a compiler")
def test_experts_that_cannot_be_asked_are_refused_unless_they_have_passed(open_driver, folder, tmp_path, monkeypatch):
    tiny(tmp_path, make_more()["mixtral"](), folder("llama"))

    def fail(*_):
        raise AttributeError("hidden_dim")

    monkeypatch.setattr("triolet.models.native.decoders.answers_of", fail)
    with pytest.raises(UnsupportedModel, match="expert by expert: its MixtralForCausalLM fails"):
        open_driver(tmp_path)
    monkeypatch.setattr(PassedComparisons, "has", lambda *_: True)
    open_driver(tmp_path)


@pytest.mark.skipif(Library.load() is None, reason="installed without a compiler")
def test_a_row_of_experts_is_compared_though_rounding_may_decide_who_computes_it(
    open_driver, folder, tmp_path, monkeypatch
):
    """Of the two prompts the shorter one fits into the window, so it does not show the fault."""
    torch.manual_seed(0)
    model = make_more()["mixtral"]()
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() > 1:
                weights.normal_(0.0, 1.5 / weights.shape[-1] ** 0.5)
    tiny(tmp_path, model, folder("llama"))
    open_driver(tmp_path, quantization="int8")
    attend = Program.attend
    monkeypatch.setattr(Program, "attend", lambda *given: attend(*given[:-1], evolve(given[-1], window=5)))
    with pytest.raises(UnsupportedModel, match="other numbers by the native library"):
        open_driver(tmp_path, quantization="int8")


def test_missing_weights_are_refused(books, open_driver, folder, tmp_path):
    """transformers would draw them at random, and warn."""
    from safetensors.torch import load_file, save_file

    copy = shutil.copytree(folder("llama"), tmp_path / "copy")
    weights = load_file(copy / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    del weights
    with pytest.raises(CheckpointError, match=r"lacks 1 weights.*layers\.1\.mlp\.up_proj"):
        open_driver(copy)
    (copy / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        open_driver(copy)
    (copy / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no weights"):
        open_driver(copy)
    assert books.live() == {}


def test_the_description_says_what_the_files_say(open_driver, folder, tmp_path):
    """eos from generation_config.json, then config.json, then the tokenizer; the identity is of all of it."""
    first = open_driver(folder("llama")).description
    assert first.kind is Kind.DECODER
    assert (first.cross_slots, first.encoder_bytes, first.speech, first.whole_prompts) == (0, 0, None, False)
    assert first.architecture == "LlamaForCausalLM"
    copy = shutil.copytree(folder("llama"), tmp_path / "copy")
    assert open_driver(copy).description.processor_identity == first.processor_identity
    path = copy / "generation_config.json"
    rewrite(path, eos_token_id=[3, 4], suppress_tokens=[9])
    second = open_driver(copy).description
    assert (second.eos_token_ids, second.suppress_token_ids) == ((3, 4), (9,))
    assert second.processor_identity != first.processor_identity
    path.unlink()
    rewrite(copy / "config.json", eos_token_id=5)
    assert open_driver(copy).description.eos_token_ids == (5,)
    rewrite(copy / "config.json", "eos_token_id")
    assert open_driver(copy).description.eos_token_ids
