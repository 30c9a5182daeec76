"""Embedding models and classifiers through the whole engine: the vectors and scores are transformers' own."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import triolet
from triolet.api.inputs import vectors

from ..checkpoints.families import make_checkpoint

TEXTS = ["a cat", "the dog in the hat on the mat", "this", "and then that one saw the cat " * 3]
CONFIG = triolet.EngineConfig(dtype="float32", verify=True)


def tokens(folder: Path, *texts: str) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)(*texts, return_tensors="pt")


@pytest.mark.parametrize(("pooling", "normalize"), [(None, None), ("cls", True), ("mean", True), ("last", False)])
async def test_embeddings_are_the_hidden_states_of_transformers_pooled(
    tmp_path: Path, pooling: str | None, normalize: bool | None
) -> None:
    folder = make_checkpoint("bert", tmp_path)
    module = transformers.AutoModel.from_pretrained(folder).eval()
    async with triolet.Engine(folder, config=CONFIG) as engine:
        got = await engine.embed(TEXTS, pooling=pooling, normalize=normalize)
        statistics = engine.statistics().requests
    for text, vector in zip(TEXTS, got, strict=True):
        with torch.no_grad():
            hidden = module(**tokens(folder, text)).last_hidden_state[0]
        pooled = {"cls": hidden[0], "mean": hidden.mean(0), "last": hidden[-1], None: hidden.mean(0)}[pooling]
        expected = pooled / pooled.norm() if normalize else pooled
        np.testing.assert_allclose(vector, expected.numpy(), atol=1e-5)
    assert statistics.steps < len(TEXTS), "texts share steps"


async def test_embeddings_of_a_decoder_are_of_its_last_token_however_it_is_cut(tmp_path: Path) -> None:
    """Chunked prefill, and a prefix that is cached."""
    folder = make_checkpoint("llama", tmp_path)
    (folder / "config.json").write_text((folder / "config.json").read_text().replace("LlamaForCausalLM", "LlamaModel"))
    module = transformers.AutoModel.from_pretrained(folder).eval()
    config = triolet.EngineConfig(dtype="float32", verify=True, max_step_tokens=16)
    async with triolet.Engine(folder, config=config) as engine:
        for _ in range(2):
            got = await engine.embed(TEXTS)
        statistics = engine.statistics().requests
    for text, vector in zip(TEXTS, got, strict=True):
        with torch.no_grad():
            hidden = module(**tokens(folder, text)).last_hidden_state[0]
        np.testing.assert_allclose(vector / np.linalg.norm(vector), hidden[-1] / hidden[-1].norm(), atol=1e-5)
    assert statistics.tokens_cached > 0


@pytest.mark.parametrize("family", ["bert_classifier", "llama_classifier"])
async def test_classes_are_the_softmax_of_transformers_scores(family: str, tmp_path: Path) -> None:
    folder = make_checkpoint(family, tmp_path)
    module = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    async with triolet.Engine(folder, config=CONFIG) as engine:
        got = await engine.classify(TEXTS)
    for text, classes in zip(TEXTS, got, strict=True):
        with torch.no_grad():
            expected = module(**tokens(folder, text)).logits[0].softmax(-1)
        assert list(classes) == list(module.config.id2label.values())
        np.testing.assert_allclose(list(classes.values()), expected.numpy(), atol=1e-5)


def reranker(folder: Path, **changes: Any) -> Any:
    """The model of a checkpoint that is written to ``folder``; its tokenizer gives the second text type 1."""
    make_checkpoint("bert_classifier", folder)
    labels = {"id2label": {0: "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    load = transformers.AutoModelForSequenceClassification.from_pretrained
    module = load(folder, **labels, **changes, ignore_mismatched_sizes=True).eval()
    torch.manual_seed(0)
    torch.nn.init.normal_(module.classifier.weight, std=0.5)
    torch.nn.init.normal_(module.bert.embeddings.token_type_embeddings.weight, std=0.5)
    module.save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return module


async def test_a_pair_for_a_model_of_one_type_is_refused(tmp_path: Path) -> None:
    """Its second text was out of range, in a step that was tried six times."""
    reranker(tmp_path, type_vocab_size=1)
    async with triolet.Engine(tmp_path, config=CONFIG) as engine:
        with pytest.raises(triolet.InvalidRequest, match=r"the type 1, and the model has type 0 alone .*; allowed"):
            await engine.score("the cat", TEXTS)
        assert engine.statistics().requests.steps == 0
        assert await engine.classify(["the cat"]) == ({"LABEL_0": 1.0},)


async def test_a_rerankers_score_reads_both_texts_and_knows_which_is_which(tmp_path: Path) -> None:
    module, folder = reranker(tmp_path), tmp_path
    async with triolet.Engine(folder, config=CONFIG) as engine:
        got = await engine.score("the cat", TEXTS)
    inputs = [tokens(folder, "the cat", text) for text in TEXTS]
    with torch.no_grad():
        expected = [float(module(**one).logits[0, 0]) for one in inputs]
        blind = [float(module(input_ids=one["input_ids"]).logits[0, 0]) for one in inputs]
    np.testing.assert_allclose(got, expected, atol=1e-5)
    assert not np.allclose(expected, blind, atol=1e-3), "token types would not matter"


async def test_many_texts_are_not_tokenized_in_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would hold up everybody else."""
    threads: list[int] = []
    build = vectors._request

    def watched(*args: Any, **more: Any) -> Any:
        threads.append(threading.get_ident())
        return build(*args, **more)

    monkeypatch.setattr(vectors, "_request", watched)
    async with triolet.Engine(make_checkpoint("bert", tmp_path), config=CONFIG) as engine:
        await engine.embed("a cat")
        await engine.embed(["a cat"] * 40)
    assert [one == threading.get_ident() for one in threads] == [True, *[False] * 40]


async def test_a_text_that_is_too_long_is_told_which_limit_it_is_over(tmp_path: Path) -> None:
    """The model's own, or that of a setting, which can be raised."""
    folder = make_checkpoint("bert", tmp_path)
    config = triolet.EngineConfig(dtype="float32", max_step_tokens=16)
    async with triolet.Engine(folder, config=config) as engine:
        with pytest.raises(triolet.RequestTooLarge, match=r"up to 16\. .*\(max_step_tokens=\d+\) or more") as caught:
            await engine.embed("a cat " * 9)
        assert not isinstance(caught.value, triolet.ContextLengthExceeded)
        with pytest.raises(triolet.ContextLengthExceeded, match=r"up to 16 \(the model has \d+ positions"):
            await engine.embed("a cat " * 2000)


@pytest.mark.parametrize(
    ("family", "call", "given", "told"),
    [
        ("bert", "generate", ("a cat",), "embed"),
        ("bert", "score", ("a", ["b"]), "no classification head"),
        ("bert", "embed", ([1],), "text or a list of texts"),
        (
            "bert_classifier",
            "score",
            ("a", ["b"]),
            r"has 3 labels; engine\.score needs a reranker, which has one label\. Use engine\.classify",
        ),
        ("llama", "embed", ("a cat",), "no vectors"),
    ],
)
async def test_what_a_model_does_not_do_is_told_and_nothing_runs_for_it(
    family: str, call: str, given: Any, told: str, tmp_path: Path
) -> None:
    async with triolet.Engine(make_checkpoint(family, tmp_path), config=CONFIG) as engine:
        with pytest.raises(triolet.InvalidRequest, match=told):
            await getattr(engine, call)(*given)
        assert engine.statistics().requests.steps == 0
        if call == "embed" and family == "bert":
            assert (await engine.embed([])).shape[0] == 0
