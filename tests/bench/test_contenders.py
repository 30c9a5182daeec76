"""The contenders of ``triolet bench``: which take part, and what several of them share. No other engine is needed."""

from __future__ import annotations

import ctypes
import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from triolet import EngineConfig
from triolet.bench.contenders import serve
from triolet.bench.entries import PEERS, ours, peers

CONTENDERS = Path(serve.__file__).parent


def test_each_peer_has_its_model_its_interpreter_and_the_types_of_its_numbers(tmp_path):
    for name in ("float32", "int8"):
        (tmp_path / name).mkdir()
    how = {"variants": ("float32", "int8"), "threads": 2, "peers": ("transformers", f"openvino={tmp_path}")}
    found = peers(Path("model"), "embed", {**how, "peers": how["peers"][1:], "peer_pythons": ("a", "openvino=b")})
    assert [(one.name, one.program, one.python) for one in found] == [
        ("openvino float32", "openvino_embed", "b"),
        ("openvino int8", "openvino_embed", "b"),
    ]
    assert [one.arguments for one in found] == [(str(tmp_path / kind), kind, "2") for kind in ("float32", "int8")]
    found = peers(tmp_path, "embed", {**how, "peer_pythons": ("a",)})
    assert [(one.name, one.python) for one in found] == [
        ("transformers float32", sys.executable),
        ("openvino float32", "a"),
        ("openvino int8", "a"),
    ]
    assert all((CONTENDERS / f"{name}.py").exists() for name in programs())


def programs():
    """The program of each peer that a command knows."""
    return [name.replace("-", "_").replace(".", "_") + f"_{kind}" for kind, known in PEERS.items() for name in known]


@pytest.mark.parametrize("off", [True, False])
def test_draft_tokens_can_be_switched_off(off):
    (entry,) = ours(Path("model"), "text", {"variants": ("int8",), "threads": 1, "no_draft_tokens": off})
    config = EngineConfig(**json.loads(entry.arguments[1]))
    assert config.speculation == (None if off else "auto")


# -- the parts of contenders -------------------------------------------------------------------------------------------


@pytest.fixture
def part(monkeypatch):
    """``part(name)``: a module that contenders share, found by its folder, as they find it."""
    monkeypatch.syspath_prepend(str(CONTENDERS))
    return importlib.import_module


class Letters:
    """A library of C whose most probable token after a token is the next one; it checks what a batch has."""

    def __init__(self):
        self.seen, self.sizes = [], []

    def llama_batch_init(self, tokens, embeddings, sequences):
        assert (embeddings, sequences) == (0, 1)
        return SimpleNamespace(
            n_tokens=0,
            token=[0] * tokens,
            pos=[0] * tokens,
            logits=[0] * tokens,
            n_seq_id=[0] * tokens,
            seq_id=[[0] for _ in range(tokens)],
        )

    def llama_decode(self, context, batch):
        self.sizes.append(batch.n_tokens)
        self.batch = batch
        for index in range(batch.n_tokens):
            told = context.setdefault(batch.seq_id[index][0], [])
            assert (len(told), batch.n_seq_id[index]) == (batch.pos[index], 1)
            told.append(batch.token[index])
        return int(any(token < 0 for token in batch.token[: batch.n_tokens]))

    def llama_get_logits_ith(self, context, index):
        assert self.batch.logits[index]
        return (ctypes.c_float * 100)(*(float(token == self.batch.token[index] + 1) for token in range(100)))


def test_prompts_are_one_batch_of_llama_cpp_and_each_is_its_own_sequence(part):
    batches, letters, opened_contexts = part("llama_batches"), Letters(), []

    def open_context(sequences, positions):
        opened_contexts.append((sequences, positions))
        return {}

    library = batches.Library(letters, 100, open_context, dict.clear)
    assert library.generate([[1, 2, 3], [10]], 3) == [[4, 5, 6], [11, 12, 13]]
    assert library.generate([[5], [7]], 2) == [[6, 7], [8, 9]]
    assert letters.sizes == [4, 2, 2, 2, 2]
    assert opened_contexts == [(2, 256)]
    long = [[1] * 3_000, [2]]
    assert library.generate(long, 2) == [[2, 3], [3, 4]]
    assert letters.sizes[5:] == [2048, 953, 2]
    assert opened_contexts == [(2, 256), (2, 3072)]
    with pytest.raises(RuntimeError, match="llama_decode returns 1 for 1 tokens"):
        library.generate([[-1]], 2)


def test_prompts_that_arrive_are_answered_one_after_the_other(part):
    batches, letters = part("llama_batches"), Letters()
    library = batches.Library(letters, 100, lambda sequences, positions: {}, dict.clear)
    model = (library, lambda prompt: [ord(prompt) - 96], lambda tokens: "".join(chr(token + 96) for token in tokens))
    task = {"prompts": ["a", "x"], "tokens": 2}
    assert batches.answer(model, task) == [{"tokens": [2, 3], "text": "bc"}, {"tokens": [25, 26], "text": "yz"}]
    assert letters.sizes == [2, 2]
    told = batches.answer(model, {**task, "arrivals": [0.0, 0.0]})
    assert [one["text"] for one in told] == ["bc", "yz"]
    assert letters.sizes[2:] == [1, 1, 1, 1]


def test_vectors_are_means_without_padding_in_the_order_of_the_texts(part):
    """Texts of similar length are a batch."""
    vectors, shapes = part("vectors"), []

    class Tokenizer:
        def encode_batch(self, texts):
            return [SimpleNamespace(ids=[int(word) for word in text.split()]) for text in texts]

    def rows(batch):
        ids = batch["input_ids"]
        shapes.append(ids.shape)
        return np.stack([ids, ids**2, np.ones_like(ids)], axis=2).astype(np.float32)

    texts = [" ".join(str(number + 1) for number in range(index % 20 + 1)) for index in range(20)][::-1]
    found = [one["vector"] for one in vectors.answer((Tokenizer(), rows), {"texts": texts})]
    assert shapes == [(16, 16), (4, 20)]
    for text, vector in zip(texts, found, strict=True):
        numbers = np.array(text.split(), float)
        mean = np.array([numbers.mean(), (numbers**2).mean(), 1.0])
        assert vector == pytest.approx(mean / np.linalg.norm(mean))
    alone = vectors.answer((Tokenizer(), rows), {"texts": texts, "each": True})
    assert len(shapes) == 22
    assert np.allclose([one["vector"] for one in alone], found)
    assert all(one["total"] >= 0 for one in alone)
