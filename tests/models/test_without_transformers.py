"""Whisper is opened without transformers, which takes a second and more to import: what stands in its place is equal to
it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import transformers
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers.audio_utils import mel_filter_bank
from transformers.models.whisper.tokenization_whisper import LANGUAGES as THEIR_LANGUAGES
from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

import triolet.demo
from triolet.core.errors import CheckpointError
from triolet.core.languages import LANGUAGE_CODES, LANGUAGES
from triolet.models.checkpoints import whisper_checkpoint as checkpoint
from triolet.models.checkpoints.whisper_tokenizer import WhisperTokenizer
from triolet.models.networks.mel import mel_filters

REAL = os.environ.get("TRIOLET_REAL")
FOLDERS = [triolet.demo.checkpoint(), *([Path(REAL) / "whisper-base"] if REAL else [])]


@pytest.fixture(scope="module", params=FOLDERS, ids=lambda folder: folder.name)
def both(request):
    theirs = transformers.AutoTokenizer.from_pretrained(request.param)

    def make():
        raise AssertionError("transformers' tokenizer is not needed")

    ours = WhisperTokenizer.read(request.param, make)
    assert ours is not None
    return ours, theirs


def test_the_vocabulary_is_the_same(both):
    ours, theirs = both
    assert ours.get_vocab() == theirs.get_vocab()
    assert len(ours) == len(theirs)


@given(data=st.data())
def test_any_text_has_the_same_tokens(both, data):
    ours, theirs = both
    words = st.sampled_from(["<|en|>", "<|0.00|>", "<|endoftext|>", " the", "\n", "don't", "  ", "é", "e\u0301"])
    text = "".join(data.draw(st.lists(words | st.text(max_size=6), max_size=8)))
    assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)


@given(data=st.data())
def test_any_tokens_have_the_same_text(both, data):
    """But those behind <|endoftext|>, which transformers takes for the <|startofprev|> that the demo's vocabulary
    lacks."""
    ours, theirs = both
    named = theirs.convert_tokens_to_ids(["<|startofprev|>", "<|startoftranscript|>", "<|endoftext|>", "<|en|>"])
    tokens = data.draw(st.lists(st.integers(0, len(theirs) - 1) | st.sampled_from(named), max_size=12))
    assume(tokens[:1] != [theirs.unk_token_id])
    assert ours.decode(tokens, skip_special_tokens=True) == theirs.decode(tokens, skip_special_tokens=True)


def test_all_else_is_transformers_own(tmp_path):
    folder = triolet.demo.checkpoint()
    theirs, made = transformers.AutoTokenizer.from_pretrained(folder), []

    def make():
        made.append(1)
        return theirs

    ours = WhisperTokenizer.read(folder, make)
    assert ours is not None
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.encode("Hello.") == theirs.encode("Hello.")
    assert ours("Hello.") == theirs("Hello.")
    assert ours.decode(np.array([40, 50]), skip_special_tokens=True) == theirs.decode([40, 50])
    assert ours.decode([40, 50], decode_with_timestamps=True) == theirs.decode([40, 50], decode_with_timestamps=True)
    assert len(made) == 1


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("tokenizer_config", {"tokenizer_class": "LlamaTokenizer"}),
        ("tokenizer_config", {"add_prefix_space": True}),
        ("tokenizer_config", {"auto_map": {"AutoTokenizer": "here.Tokenizer"}}),
        ("tokenizer_config", {"pad_token": "a new one"}),
        ("tokenizer_config", {"additional_special_tokens": [{"content": "another"}]}),
        ("tokenizer_config", {"mask_token": "a new one"}),
        ("tokenizer_config", {"extra_special_tokens": ["another"]}),
        ("tokenizer_config", {"extra_special_tokens": {"image_token": "another"}}),
        ("tokenizer_config", {"added_tokens_decoder": {"3": {"content": "<|en|>", "special": True}}}),
        ("special_tokens_map", {"bos_token": {"content": "a new one"}}),
        ("added_tokens", {"a new one": 60_000}),
        ("tokenizer", {"normalizer": {"type": "Lowercase"}}),
        ("tokenizer", {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}}),
        ("tokenizer", {"decoder": None}),
        ("tokenizer", {"model": "none"}),
    ],
)
def test_files_that_say_more_are_left_to_transformers(name, change, tmp_path):
    folder = shutil.copytree(triolet.demo.checkpoint(), tmp_path / "model")
    path = folder / f"{name}.json"
    told = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(told | change))
    assert WhisperTokenizer.read(folder, lambda: None) is None


def test_what_a_tokenizer_was_trained_with_changes_no_prompt(tmp_path):
    """tokenizer.json may tell of padding and truncation, which transformers sets anew for every text."""
    folder = shutil.copytree(triolet.demo.checkpoint(), tmp_path / "model")
    told = json.loads((folder / "tokenizer.json").read_text())
    padding = {"strategy": {"Fixed": 20}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 1}
    told["padding"] = {**padding, "pad_type_id": 0, "pad_token": "a"}
    told["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(told))
    ours = WhisperTokenizer.read(folder, lambda: None)
    theirs = transformers.AutoTokenizer.from_pretrained(triolet.demo.checkpoint())
    assert ours.encode(" one two three", add_special_tokens=False) == theirs.encode(
        " one two three", add_special_tokens=False
    )


def test_files_that_have_changed_since_are_told():
    folder = triolet.demo.checkpoint()

    class Changed:
        def get_vocab(self):
            return {}

    with pytest.raises(CheckpointError, match="changed since"):
        WhisperTokenizer.read(folder, Changed)("a text")


def test_settings_that_are_not_written_are_those_of_transformers():
    theirs = transformers.WhisperConfig().to_dict()
    assert {name: theirs[name] for name in checkpoint._DEFAULTS} == {
        name: list(value) if isinstance(value, tuple) else value for name, value in checkpoint._DEFAULTS.items()
    }


def test_the_languages_are_those_of_transformers():
    assert dict(LANGUAGES) == THEIR_LANGUAGES
    assert dict(LANGUAGE_CODES) == TO_LANGUAGE_CODE


@pytest.mark.parametrize(("mels", "n_fft", "rate"), [(80, 400, 16_000), (128, 400, 16_000), (20, 512, 22_050)])
def test_the_mel_filters_are_those_of_transformers(mels, n_fft, rate):
    theirs = mel_filter_bank(1 + n_fft // 2, mels, 0.0, 8_000.0, rate, norm="slaney", mel_scale="slaney")
    assert np.array_equal(mel_filters(1 + n_fft // 2, mels, rate).astype("f4"), theirs.T.astype("f4"))


@pytest.mark.real_time
def test_whisper_is_opened_without_it():
    code = """
import sys
import numpy as np, triolet, triolet.demo, trio
async def main():
    async with triolet.Engine(triolet.demo.checkpoint()) as engine:
        await engine.transcribe(np.zeros(16000, np.float32), language="english")
trio.run(main)
print("transformers" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout == "False\n"
