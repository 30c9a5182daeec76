"""A file of whisper.cpp opens as it is: what is computed of it is what transformers computes of the same numbers."""

from __future__ import annotations

import copy
import os
import random
import struct
from pathlib import Path

import pytest
import torch

from triolet.core.errors import CheckpointError, UnsupportedModel
from triolet.models.checkpoints.files import resolve
from triolet.models.checkpoints.weights import open_weights
from triolet.models.checkpoints.whisper_checkpoint import read_checkpoint

from ..checkpoints.whisper_ggml import write_ggml
from .conftest import byte_alphabet
from .test_ctranslate2 import SAME, check_tokens

REAL = os.environ.get("TRIOLET_REAL", "")
BYTES = [bytes([byte]) for byte in range(256)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def reference(make):
    """A model whose rows are whole blocks."""
    return make(d_model=64, encoder_attention_heads=4, decoder_attention_heads=4)


@pytest.fixture
def check(reference, tmp_path, open_driver, features, audio, ids, job):
    """``check(kind)`` compares a model with matrices of that kind, and returns the kinds of blocks that are held."""

    def run(kind, **options):
        made = copy.deepcopy(reference)
        driver = open_driver(write_ggml(tmp_path / "ggml-tiny.bin", made, BYTES, kind), dtype="float32")
        check_tokens(driver, made, features, audio, ids, job, **options)
        held = [getattr(one, "sections", ()) for one in driver.executor._open.parts.model.module.modules()]
        return {section.kind for sections in held for section in sections}

    return run


@pytest.mark.parametrize("kind", ["F32", "F16"])
def test_it_computes_what_transformers_does(kind, check):
    assert check(kind) == set()


@pytest.mark.parametrize("kind", ["Q5_0", "Q8_0"])
def test_blocks_are_decoded_without_the_native_library(kind, check, without_native):
    assert check(kind) == set()


@pytest.mark.parametrize("kind", ["Q5_0", "Q8_0"])
def test_blocks_stay_packed_in_the_native_library(kind, check):
    """Which quantizes the inputs of products to 16 bits."""
    assert check(kind, near=3e-4, sure=3e-3) == {kind}


def test_it_has_the_settings_of_its_checkpoint(reference, save, tmp_path):
    """Except tokens that are not written: the small checkpoint lists none."""
    ours = read_checkpoint(resolve(write_ggml(tmp_path / "ggml-tiny.bin", copy.deepcopy(reference), BYTES)))
    theirs = read_checkpoint(save(tmp_path / "checkpoint", reference))
    for name in set(SAME) - {"alignment", "suppress_token_ids", "begin_suppress_token_ids"}:
        assert getattr(ours, name) == getattr(theirs, name), name
    assert {*map(ord, '"#()*+'), 262, 265} <= {*ours.suppress_token_ids}
    assert {ord(" "), 256} == {*ours.begin_suppress_token_ids}


@pytest.fixture(scope="module")
def whole(reference, tmp_path_factory):
    """A right file, as bytes."""
    path = tmp_path_factory.mktemp("ggml") / "ggml-tiny.bin"
    return write_ggml(path, copy.deepcopy(reference), BYTES, "Q8_0").read_bytes()


@pytest.mark.parametrize(
    ("place", "value", "told"),
    [
        (4, 1 << 30, "is a damaged whisper.cpp file: it has the sizes 1073741824, .* which no Whisper has"),
        (4, 1000, r"has 1000 tokens, 256 of them for texts and 101 for times, so 635 for languages; allowed: 1 to 100"),
        (8, -1, "it has the sizes 368, -1, "),
        (48, 9, "and 9 bands, which no Whisper has"),
        (52, 1 << 20, "it ends within its mel filters"),
    ],
)
def test_sizes_that_cannot_be_are_refused(place, value, told, whole, tmp_path):
    data = bytearray(whole)
    data[place : place + 4] = struct.pack("i", value)
    (tmp_path / "ggml-tiny.bin").write_bytes(data)
    with pytest.raises(CheckpointError, match=told):
        resolve(tmp_path / "ggml-tiny.bin")


def test_a_tensor_of_another_model_is_refused(whole, tmp_path):
    path = tmp_path / "ggml-tiny.bin"
    path.write_bytes(whole.replace(b"encoder.ln_post.bias", b"encoder.lm_post.bias"))
    with pytest.raises(UnsupportedModel, match=r"has the tensor encoder.lm_post.bias, which Whisper does not have"):
        open_weights(resolve(path) / "gguf.json")


def test_damaged_files_are_refused_or_read(whole, tmp_path):
    """Bytes are changed or cut off, most of them in the numbers before a tensor."""
    drawn, path = random.Random(0), tmp_path / "ggml-tiny.bin"
    names = [place for place in range(len(whole)) if whole.startswith((b"encoder.", b"decoder."), place)]
    refused = list[str]()
    for _ in range(60):
        data, place = bytearray(whole), drawn.choice([drawn.choice(names) - drawn.randrange(20), drawn.randrange(2000)])
        if drawn.random() < 0.3:
            del data[place:]
        else:
            data[place] ^= 1 << drawn.randrange(8)
        path.write_bytes(data)
        try:
            for each in open_weights(resolve(path) / "gguf.json").values():
                each.read(torch.float32)
        except CheckpointError as error:
            refused.append(str(error))
    assert len(refused) > 20
    assert all("ggml-tiny.bin" in one for one in refused)


@pytest.mark.real
@pytest.mark.skipif(not REAL, reason="TRIOLET_REAL names no folder")
def test_a_real_file_has_the_settings_of_its_checkpoint(tmp_path):
    """Also the tokens that are not written, found from the vocabulary alone."""
    from tokenizers import Tokenizer
    from transformers import WhisperForConditionalGeneration

    folder = Path(REAL) / "whisper-base"
    theirs = read_checkpoint(folder)
    alphabet = {text: byte for byte, text in enumerate(byte_alphabet())}
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = [bytes(alphabet[one] for one in backend.id_to_token(number)) for number in range(theirs.eos_token_ids[0])]
    model = WhisperForConditionalGeneration.from_pretrained(folder)
    ours = read_checkpoint(resolve(write_ggml(tmp_path / "ggml-base.bin", model, tokens)))
    for name in set(SAME) - {"alignment"}:
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.tokens == theirs.tokens
    for text in ("Hello world, it's 2024!", "Grüße — 你好, 日本語 naïve café", " a b  c", "<|de|>x"):
        assert (
            ours.tokenizer.encode(text, add_special_tokens=False) == backend.encode(text, add_special_tokens=False).ids
        )
