"""`triolet card`: the figures of a card are those that transformers' own classes give, computed again here."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertModel,
    WhisperConfig,
    WhisperForConditionalGeneration,
)
from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

from triolet import demo
from triolet.__main__ import main
from triolet.bench import figures, judges, quality
from triolet.bench.machine import Machine
from triolet.models.checkpoints.files import resolve
from triolet.models.native.library import Library

from ..checkpoints import quantized_checkpoints as layouts
from ..checkpoints.checkpoints import random_model, save_checkpoint, text_settings
from ..checkpoints.families import make_checkpoint
from ..checkpoints.gguf_converted import bert, write_converted
from ..checkpoints.gguf_files import tiny, write_gguf
from ..checkpoints.whisper_ggml import write_ggml
from ..checkpoints.words import BERT
from .test_quality import distributions

PROSE = "\n\n".join(f"a small harbour, and {count} ships of many nations" for count in range(9))
MACHINE = Machine(cpu="a CPU", threads=1, load=0.5, gigaflops={"float32": 1.0}, gigabytes=2.0)
native = pytest.mark.skipif(Library.load() is None, reason="installed without a compiler")


@pytest.fixture
def card(monkeypatch, tmp_path):
    """``card(model, *words)``: the exit status, and the figures by row."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(figures.Machine, "measure", lambda threads: MACHINE)
    for name, count in (("_TURNS", 1), ("_TOGETHER", 2), ("_TEXTS", 4), ("_WRITTEN", 8)):
        monkeypatch.setattr(judges, name, count)
    (tmp_path / "prose.txt").write_text(PROSE)

    def run(model: Path, *words: str, inputs: Path | None = None) -> tuple[int, dict[str, Any]]:
        told = tmp_path / "figures.json"
        given = ("--inputs", str(inputs or tmp_path / "prose.txt"), "--figures", str(told), "--threads", "1")
        monkeypatch.setattr(sys, "argv", ["triolet", "card", str(model), *given, *words])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, json.loads(told.read_text())["rows"] if told.exists() else {}

    return run


@native
def test_a_decoder_is_as_far_from_transformers_as_its_distributions(card, tmp_path, capsys, monkeypatch):
    """Other weights change agreement, divergence and perplexity; its own in float32 change nothing. Rows are compared
    in parts, which transformers reads with the keys and values of those before."""
    monkeypatch.setattr(quality, "ROWS", 50)
    one, other = (make_checkpoint("llama", tmp_path / str(seed), seed=seed) for seed in (1, 2))
    status, rows = card(
        one, "--also", f"other={other}", "--variant", "int4", "--about", "A toy.", "--note", "It is tiny."
    )
    assert status == 0
    (ids, exact), (_, found) = (distributions(each, PROSE) for each in (one, other))
    same, wrong = rows["float32"]["accuracy"], rows["other"]["accuracy"]
    assert (same["same"], same["divergence"]) == (1.0, pytest.approx(0.0, abs=1e-7))
    assert wrong["same"] == float((exact.argmax(-1) == found.argmax(-1)).double().mean()) < 1.0
    assert wrong["divergence"] == pytest.approx(float((exact.exp() * (exact - found)).sum(-1).mean()), rel=1e-3)
    for row, each in ((rows["transformers, float32"], exact), (wrong, found)):
        surprise = -each[:-1].gather(1, torch.tensor(ids[1:])[:, None]).mean()
        assert row["perplexity"] == pytest.approx(float(surprise.exp()), rel=1e-4)
    assert rows["int4"]["held"] < rows["float32"]["held"]
    assert min(rows["float32"]["speed"].values()) > 0.0
    page = capsys.readouterr().out
    assert "\n\nA toy.\n\n" in page
    assert "\n- It is tiny.\n" in page
    size = (other / "model.safetensors").stat().st_size
    cells = f"{wrong['perplexity']:.3f} | {wrong['same']:.2%} | {wrong['divergence']:.2g} | "
    assert f"| other | model.safetensors {size / 1e6:.1f} | {rows['other']['held']:.1f} | {cells}" in page


@native
def test_the_reference_of_a_gguf_file_is_transformers_with_the_decoded_weights(card, tmp_path, capsys):
    made = tiny("LlamaConfig", "LlamaForCausalLM")
    path = write_gguf(tmp_path / "m.gguf", "llama", made, kinds={"_norm": "", "attn": "Q4_0", "ffn": "Q5_1"})
    status, rows = card(path, "--variant", "float32", "--only", "accuracy")
    assert status == 0
    ids = AutoTokenizer.from_pretrained(resolve(path))(PROSE).input_ids[: made.config.max_position_embeddings]
    with torch.inference_mode():
        exact = made(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    perplexity = float((-exact[:-1].gather(1, torch.tensor(ids[1:])[:, None])).mean().exp())
    assert len(ids) > 9
    assert rows["transformers, float32"]["perplexity"] == pytest.approx(perplexity, rel=1e-4)
    assert rows["float32"]["accuracy"]["divergence"] == pytest.approx(0.0, abs=1e-6)
    assert "m.gguf" in capsys.readouterr().out


@native
def test_the_reference_of_packed_weights_is_transformers_with_the_decoded_weights(card, tmp_path, capsys):
    wide = layouts.make_wide(tmp_path / "wide")
    packed, decoded = layouts.quantize(wide, tmp_path / "packed", *layouts.gptq())
    status, rows = card(packed, "--variant", "float32", "--only", "accuracy")
    assert status == 0
    ids, exact = distributions(decoded, PROSE)
    perplexity = float((-exact[:-1].gather(1, torch.tensor(ids[1:])[:, None])).mean().exp())
    assert rows["transformers, float32"]["perplexity"] == pytest.approx(perplexity, rel=1e-4)
    assert rows["float32"]["accuracy"]["divergence"] == pytest.approx(0.0, abs=1e-6)
    whole = sum(one.numel() for one in AutoModelForCausalLM.from_pretrained(decoded).parameters())
    assert f"| parameters | {whole / 1e6:.1f} million |" in capsys.readouterr().out


def test_vectors_are_as_far_from_transformers_as_their_cosines(card, tmp_path):
    one, other = (tmp_path / str(seed) for seed in (1, 2))
    tokenizer = BERT.make()
    config = BertConfig(**{**text_settings(tokenizer), "max_position_embeddings": 1_024})
    for seed, folder in enumerate((one, other)):
        save_checkpoint(folder, random_model(BertModel, config, seed), tokenizer)
    status, rows = card(one, "--also", f"other={other}", "--variant", "float32", "--most", "5")
    assert status == 0
    tokenizer, texts = AutoTokenizer.from_pretrained(one), PROSE.split("\n\n")[:5]
    exact, found = (
        np.stack([unit(model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)) for text in texts])
        for model in (AutoModel.from_pretrained(folder).eval() for folder in (one, other))
    )
    cosines = (exact * found).sum(1)
    wrong = rows["other"]["accuracy"]
    assert wrong["least_cosine"] == pytest.approx(cosines.min(), abs=1e-5)
    assert wrong["cosine"] == pytest.approx(cosines.mean(), abs=1e-5)
    nearest = [
        [max(set(range(5)) - {at}, key=lambda to: rows[at] @ rows[to]) for at in range(5)] for rows in (exact, found)
    ]
    assert wrong["nearest"] == np.mean(np.equal(*nearest))
    assert rows["float32"]["accuracy"] == {name: pytest.approx(1.0, abs=1e-5) for name in wrong}
    assert min(rows["float32"]["speed"].values()) > 0.0


def test_the_vectors_of_a_gguf_file_are_compared_with_those_of_the_decoded_weights(card, tmp_path):
    made = tiny("BertConfig", "BertModel", hidden_size=64, intermediate_size=64)

    def told(writer: Any, config: Any) -> None:
        writer.add_pooling_type(gguf.PoolingType.CLS)
        writer.add_causal_attention(False)

    path = write_converted(tmp_path / "m.gguf", "bert", made, bert(made), more=told, words={"pre": "bert"})
    status, rows = card(path, "--variant", "float32", "--only", "accuracy", "--most", "3")
    assert status == 0
    assert rows["float32"]["accuracy"] == {name: pytest.approx(1.0, abs=1e-5) for name in rows["float32"]["accuracy"]}


def unit(vector: torch.Tensor) -> Any:
    return torch.nn.functional.normalize(vector, dim=0).detach().numpy()


@pytest.fixture
def recordings(tmp_path):
    """Sentences of the demo, in whose texts two words are wrong."""
    folder = tmp_path / "recordings"
    folder.mkdir()
    for name, right, wrong in (("en-command", "cellar", "attic"), ("en-noisy", "radio", "lamp")):
        sample = next(one for one in demo.samples() if one.path.stem == name)
        (folder / sample.path.name).write_bytes(sample.path.read_bytes())
        assert sample.text.count(right) == 1
        (folder / f"{name}.txt").write_text(sample.text.replace(right, wrong))
    return folder


def test_wrong_words_are_counted_and_a_file_of_figures_is_gone_on_with(card, recordings, tmp_path, capsys):
    """Beside the texts, and beside those of transformers: when a word of these is changed, one word is unlike."""
    told, other = tmp_path / "figures.json", tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "hat"}')
    words = ("--variant", "float32", "--also", f"other={other}", "--language")
    status, rows = card(demo.checkpoint(), *words, "en", inputs=recordings)
    assert status == 0
    normal = EnglishTextNormalizer({})
    count = sum(len(normal(path.read_text()).split()) for path in recordings.glob("*.txt"))
    assert rows["float32"]["accuracy"] == {name: pytest.approx(200 / count) for name in ("errors", "greedy_errors")} | {
        "unlike": 0.0
    }
    assert rows["transformers, float32"] == {"greedy_errors": pytest.approx(200 / count)}
    assert min(rows["float32"]["speed"].values()) > 0.0
    assert "hat" in rows["other"]["refused"]
    assert f"- other is refused: {rows['other']['refused']}" in capsys.readouterr().out
    kept = json.loads(told.read_text())
    assert kept["inputs"].startswith("recordings: 33 words, ")
    kept["heard"] = [text.replace("cellar", "attic") for text in kept["heard"]]
    del kept["rows"]["float32"]["accuracy"]
    kept["rows"]["float32"]["speed"]["open"] = 99.0
    told.write_text(json.dumps(kept))
    _, rows = card(demo.checkpoint(), *words, "en", inputs=recordings)
    assert rows["float32"]["accuracy"]["unlike"] == pytest.approx(100 / count)
    assert rows["float32"]["speed"]["open"] == 99.0  # what the file has is not measured again
    page = capsys.readouterr().out
    assert "| 99.00 |" in page
    assert "--variant float32" in page
    assert (page.count("a CPU, 1 threads"), len(json.loads(told.read_text())["runs"]["accuracy"].split("; "))) == (3, 2)
    assert card(demo.checkpoint(), *words, "de", inputs=recordings)[0] == 1
    assert "the figures are of another model or other inputs" in capsys.readouterr().err


def test_a_file_that_transformers_cannot_read_is_beside_its_checkpoint(card, recordings, tmp_path, capsys):
    """A file of whisper.cpp has the size of this file."""
    tokens = [bytes([byte]) for byte in range(256)]
    sizes: dict[str, Any] = {"vocab_size": 1_864, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1}
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    sizes |= {"encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "decoder_start_token_id": 257}
    sizes |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 256) | {"begin_suppress_tokens": None}
    made = random_model(WhisperForConditionalGeneration, WhisperConfig(**sizes), 0)
    path = write_ggml(tmp_path / "ggml-tiny.bin", made, tokens)
    assert card(path, inputs=recordings)[0] == 1
    assert "give the checkpoint from which it was converted" in capsys.readouterr().err
    assert [one.name for one in figures.weights_of(resolve(path))] == [path.name]


def test_what_cannot_become_a_card_is_refused(card, recordings, tmp_path, capsys):
    bert, scores = (make_checkpoint(family, tmp_path / family) for family in ("bert", "bert_classifier"))
    (tmp_path / "prose.json").write_text("{")
    for words, status, told in (
        ((bert, "--also", "other"), 2, "--also other; allowed: NAME=MODEL, each name once"),
        ((bert, "--also", f"int8={bert}"), 2, "allowed: NAME=MODEL, each name once"),
        ((scores,), 1, "has no card; allowed: models of speech, text and vectors"),
        ((bert, "--out", "/nowhere/card.md"), 1, "there is no folder /nowhere"),
        ((bert, "--figures", tmp_path / "prose.json"), 1, "prose.json cannot be read"),
    ):
        assert card(*map(str, words))[0] == status
        assert told in capsys.readouterr().err
    (tmp_path / "one").write_text("a cat\n\na cat")
    assert card(bert, inputs=tmp_path / "one")[0] == 1
    assert "one has 1 different paragraphs; allowed: 2 or more" in capsys.readouterr().err
    assert card(bert, inputs=recordings)[0] == 1
    assert "recordings cannot be read: Is a directory; give a file of prose" in capsys.readouterr().err
    (tmp_path / "figures.json").write_text(json.dumps({"kind": "text", "rows": {}}))
    assert card(bert)[0] == 1
    assert "the figures are of another model or other inputs" in capsys.readouterr().err
