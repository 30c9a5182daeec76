"""GGUF files of models of vectors open as such: their vectors are those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from attrs import evolve

from triolet.core.errors import CheckpointError, UnsupportedModel
from triolet.core.model import Kind
from triolet.core.request import Pooling
from triolet.models.checkpoints.files import converses, resolve
from triolet.models.checkpoints.gguf_file import read_gguf
from triolet.models.checkpoints.gguf_folder import settings_folder
from triolet.models.checkpoints.gguf_tokenizer import make_tokenizer
from triolet.models.checkpoints.loading import read_tokenizer

from ..checkpoints import gguf_converted as made_by
from ..checkpoints.checkpoints import classes
from ..checkpoints.gguf_converted import bert, named, stacked, write_converted
from ..checkpoints.gguf_files import TOKENS, UNIGRAM, add_unigram, letters, tiny, write_gguf
from .texts import Job, noise

BERT, XLM_R = {"pre": "bert"}, {"pre": "t5"}
SMALL = {"hidden_size": 64, "intermediate_size": 64}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def heads(writer: Any, config: Any) -> None:
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)


def windowed(writer: Any, config: Any) -> None:
    """The window as config.json has it, of which transformers takes a half to each side."""
    heads(writer, config)
    writer.add_sliding_window(2 * (config.sliding_window - 1))


def alternating(writer: Any, config: Any) -> None:
    """All that the converter may write of a ModernBERT; a file of before has only the window."""
    writer.add_sliding_window(config.local_attention)
    writer.add_sliding_window_pattern(2)
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    writer.add_string("modern-bert.hidden_activation", config.hidden_activation)


def experts(writer: Any, config: Any) -> None:
    heads(writer, config)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)


SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
PADDED = {"pad_token_id": 256, "max_position_embeddings": 320, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32}
HEADED = {"head_dim": 32, "num_hidden_layers": 2}
MODELS: dict[str, tuple[str, str, dict[str, Any], Any, Any, dict[str, Any]]] = {
    "bert": ("BertConfig", "BertModel", {}, bert, None, BERT),
    "bert:xlm-r": ("XLMRobertaConfig", "XLMRobertaModel", PADDED, made_by.roberta, None, XLM_R),
    "bert:roberta": ("RobertaConfig", "RobertaModel", PADDED, made_by.roberta, None, {"pre": "roberta-bpe"}),
    "jina-bert-v3": (
        *("JinaEmbeddingsV3Config", "JinaEmbeddingsV3Model"),
        *({"num_key_value_heads": 4}, made_by.jina_bert, None, XLM_R),
    ),
    "modern-bert": (
        *("ModernBertConfig", "ModernBertModel"),
        {
            "num_hidden_layers": 4,
            "local_attention": 8,
            "hidden_activation": "silu",
            "layer_types": ["full_attention", "sliding_attention"] * 2,
        },
        *(made_by.modern_bert, alternating, {"pre": "modern-bert"}),
    ),
    "modern-bert:plain": (
        *("ModernBertConfig", "ModernBertModel"),
        {"num_hidden_layers": 4, "local_attention": 8},
        *(named, lambda writer, config: writer.add_sliding_window(config.local_attention), {"pre": "modern-bert"}),
    ),
    "nomic-bert": ("NomicBertConfig", "NomicBertModel", {"head_dim": 16}, made_by.nomic_bert, None, BERT),
    "eurobert": ("EuroBertConfig", "EuroBertModel", {}, named, None, {}),
    "gemma-embedding": (
        *("Gemma3TextConfig", "Gemma3TextModel"),
        {**GEMMA, "num_hidden_layers": 6, "sliding_window": 8, "use_bidirectional_attention": True},
        made_by.gemma_embedding,
        windowed,
        {},
    ),
    "qwen3": ("Qwen3Config", "Qwen3Model", HEADED, named, heads, {}),
    "qwen2vl": ("Qwen2VLTextConfig", "Qwen2VLTextModel", {"rope_parameters": SECTIONS}, named, None, {}),
    "qwen3vl": (
        *("Qwen3VLTextConfig", "Qwen3VLTextModel"),
        {"head_dim": 16, "rope_parameters": {**SECTIONS, "mrope_interleaved": True}},
        *(named, heads, {}),
    ),
    "qwen3vlmoe": (
        *("Qwen3VLMoeTextConfig", "Qwen3VLMoeTextModel"),
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        *(lambda model: stacked(model, {"layers.": "model.layers."}), experts, {}),
    ),
}
POOLINGS = {"bert": "cls", "bert:xlm-r": "cls", "bert:roberta": "cls"}


@pytest.mark.parametrize("architecture", MODELS)
def test_vectors_are_those_of_the_model_that_was_converted(architecture, tmp_path, open_driver):
    config, model, changes, parts, more, words = MODELS[architecture]
    made = tiny(config, model, **SMALL | changes)
    decodes = architecture.startswith("qwen")
    kind = "last" if decodes else POOLINGS.get(architecture, "mean")

    def told(writer: Any, config: Any) -> None:
        writer.add_pooling_type(gguf.PoolingType[kind.upper()])
        if not decodes:
            writer.add_causal_attention(False)
        if more is not None:
            more(writer, config)

    name = architecture.partition(":")[0]
    path = write_converted(tmp_path / "m.gguf", name, made, parts(made), more=told, words=words)
    driver = open_driver(path, dtype="float32")
    assert driver.description.kind is Kind.POOLING
    assert driver.description.default_pooling == Pooling(kind=kind)
    assert not converses(resolve(path))
    prompts = [noise(length, length) for length in (3, 17, 40)]
    found = driver.run(*[Job(prompt=prompt, pooling=Pooling(kind=kind)) for prompt in prompts])
    for prompt, one in zip(prompts, found, strict=True):
        with torch.inference_mode():
            hidden = made(torch.tensor([prompt])).last_hidden_state[0]
        expected = {"cls": hidden[0], "mean": hidden.mean(0), "last": hidden[-1]}[kind]
        assert one.vector == pytest.approx(expected.tolist(), abs=2e-4)


def test_a_vocabulary_of_bert_cuts_words_as_bert_does(tmp_path):
    """Without accents and capitals, into a first piece and others; as transformers' own tokenizer does."""
    made = tiny("BertConfig", "BertModel", **SMALL)
    folder = settings_folder(write_converted(tmp_path / "m.gguf", "bert", made, bert(made), words=BERT))
    ours = read_tokenizer(folder)
    vocabulary = dict(sorted(ours.get_vocab().items(), key=lambda pair: pair[1]))
    theirs = classes().BertTokenizer(vocab=vocabulary)
    for text in ("The cats on a mat", "naïve matting, Zebra", "[SEP] ab a  b"):
        assert ours(text).input_ids == theirs(text).input_ids
    assert ours.convert_ids_to_tokens(ours("The cats").input_ids) == ["[CLS]", "the", "cat", "##s", "[SEP]"]


@pytest.mark.parametrize(
    ("told", "found"),
    [({}, "naive zebra"), ({"strip_accents": False}, "naïve zebra"), ({"lowercase": False}, "naïve Zebra")],
)
def test_a_vocabulary_of_bert_has_the_letters_that_the_file_says(told, found, tmp_path):
    made = tiny("BertConfig", "BertModel", **SMALL)

    def more(writer: Any, config: Any) -> None:
        for name, value in told.items():
            writer.add_bool(f"tokenizer.ggml.normalizer.{name}", value)

    file = read_gguf(write_converted(tmp_path / "m.gguf", "bert", made, bert(made), words=BERT, more=more))
    assert make_tokenizer(file)[0].normalizer.normalize_str("naïve Zebra") == found
    wrong = evolve(file, settings={**file.settings, "tokenizer.ggml.normalizer.lowercase": 1})
    with pytest.raises(CheckpointError, match=r"normalizer={'lowercase': 1.*; allowed: true or false"):
        make_tokenizer(wrong)


def test_a_vocabulary_of_xlm_r_cuts_words_as_xlm_r_does(tmp_path):
    """Where the sum of scores is best, after letters are replaced; as transformers' own tokenizer does."""
    config, model, changes, parts, _, words = MODELS["bert:xlm-r"]
    made = tiny(config, model, **SMALL | changes)
    ours = read_tokenizer(settings_folder(write_converted(tmp_path / "m.gguf", "bert", made, parts(made), words=words)))
    theirs = classes().XLMRobertaTokenizer(vocab=list(UNIGRAM.items()), _spm_precompiled_charsmap=letters())
    for text in ("the cats", "  a  c@ts\t\nthe\u3000hat ", "the</s> żż cat", ""):
        assert ours(text).input_ids == theirs(text).input_ids
    assert ours.convert_ids_to_tokens(ours("the c@ts").input_ids) == ["<s>", "▁the", "▁cat", "s", "</s>"]
    assert ours.decode(ours("the cats").input_ids, skip_special_tokens=True) == "the cats"


TABLE = "a damaged table of letters"


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("precompiled_charsmap", b"\1", TABLE),
        ("precompiled_charsmap", letters()[:1000], TABLE),
        ("precompiled_charsmap", letters(below=1 << 20), TABLE),
        ("precompiled_charsmap", letters(place=2), TABLE),
        ("precompiled_charsmap", letters(place=1, texts="é\0".encode()), TABLE),
        ("precompiled_charsmap", letters(texts=b"\xff\0"), TABLE),
        ("precompiled_charsmap", ["a"], TABLE),
        ("token_types", [1] * TOKENS, "no token for unknown words"),
        ("token_scores", [float("nan")] * TOKENS, "320 tokens with 320 scores"),
    ],
)
def test_a_damaged_vocabulary_of_xlm_r_is_refused(name, value, told, tmp_path):
    """Else the library would panic with the first text, or with one that has a certain letter."""
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "bert")
    add_unigram(writer)
    getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=f"m.gguf has {told}"):
        make_tokenizer(read_gguf(path))


@pytest.mark.parametrize(
    ("pooling", "causal", "kind", "told"),
    [
        (4, None, UnsupportedModel, r"m.gguf ranks texts \(pooling_type=4\); allowed: models that generate"),
        (None, None, UnsupportedModel, r"m.gguf ranks texts \(pooling_type=None\)"),
        (9, None, CheckpointError, "has pooling_type=9; allowed: 0 to 4"),
        (
            1,
            False,
            UnsupportedModel,
            "attention.causal=False: .*, in LlamaForCausalLM of transformers they do not",
        ),
    ],
)
def test_vectors_that_would_be_others_are_refused(pooling, causal, kind, told, tmp_path):
    """Early files that rank texts do not tell so, but have what ranks them."""

    def more(writer: Any, config: Any) -> None:
        if pooling is None:
            writer.add_tensor("cls.output.weight", torch.ones(1, 64).numpy())
        else:
            writer.add_uint32("llama.pooling_type", pooling)
        if causal is not None:
            writer.add_causal_attention(causal)

    made = tiny("LlamaConfig", "LlamaForCausalLM", num_hidden_layers=1, **SMALL)
    with pytest.raises(kind, match=told):
        settings_folder(write_gguf(tmp_path / "m.gguf", "llama", made, more=more))
