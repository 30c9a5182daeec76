"""Damaged GGUF files are refused by an error that names what is wrong. Nothing is read behind a file's end, and nothing
is allocated by a number that the file cannot hold."""

from __future__ import annotations

import os
import random
import resource
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from attrs import evolve
from torch import nn

from triolet.core.errors import CheckpointError, UnsupportedModel
from triolet.models.checkpoints.files import folder_here, resolve
from triolet.models.checkpoints.gguf_file import Header, read_gguf, read_split
from triolet.models.checkpoints.gguf_folder import settings_folder
from triolet.models.checkpoints.gguf_models import read_gguf_config
from triolet.models.checkpoints.gguf_tensors import noted_tensors
from triolet.models.checkpoints.gguf_tokenizer import make_tokenizer
from triolet.models.checkpoints.loading import load_module

from ..checkpoints.gguf_files import tiny, write_gguf

HUGE = 1 << 62


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def setting(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def written(
    *parts: bytes, tensors: int = 0, settings: int = 0, magic: bytes = b"GGUF", version: int = 3, data: int = 0
) -> bytes:
    head = magic + struct.pack("<IQQ", version, tensors, settings) + b"".join(parts)
    return head + bytes(-len(head) % 32 + data)


ARCHITECTURE = setting("general.architecture", 8, text("llama"))
BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "it ends within its magic number"),
    "short": (b"GGUF\3", "it ends within its version"),
    "magic": (written(magic=b"GGML"), "begins with b'GGML', not with b'GGUF'"),
    "version": (written(version=1), "is of version 1 of GGUF; allowed: versions 2 and 3"),
    "big-endian": (written(version=3 << 24), "was written for big-endian machines"),
    "counts": (b"GGUF" + struct.pack("<IQ", 3, 0), "it ends within its counts"),
    "settings": (written(settings=HUGE), f"says that it has {HUGE} settings and 0 tensors, more than"),
    "tensors": (written(tensors=HUGE), f"says that it has 0 settings and {HUGE} tensors, more than"),
    "long name": (written(struct.pack("<Q", HUGE), settings=1), f"the name of setting 0 has {HUGE} bytes, more than"),
    "no text": (written(struct.pack("<Q", 2) + b"\xff\xfe", settings=1), "the name of setting 0 is no text"),
    "long text": (written(setting("a", 8, struct.pack("<Q", HUGE)), settings=1), f"a has {HUGE} bytes, more than"),
    "type": (written(setting("a", 13, b"1234"), settings=1), "a is of the type 13, which no version of GGUF has"),
    "twice": (written(ARCHITECTURE, ARCHITECTURE, settings=2), "it has general.architecture twice"),
    "nested": (written(setting("a", 9, struct.pack("<IQ", 9, 2)), settings=1), "a is a list of lists"),
    "list": (written(setting("a", 9, struct.pack("<IQ", 4, HUGE)), settings=1), f"a has {HUGE} values, more than"),
    "list of": (written(setting("a", 9, struct.pack("<IQ", 99, 1)), settings=1), "a is of the type 99"),
    "texts": (written(setting("a", 9, struct.pack("<IQ", 8, HUGE)), settings=1), f"a has {HUGE} texts, more than"),
    "a text of a list": (
        written(setting("a", 9, struct.pack("<IQQ", 8, 1, HUGE)), settings=1),
        "it ends within a",
    ),
    "alignment": (written(setting("general.alignment", 4, struct.pack("<I", 24)), settings=1), "alignment is 24"),
    "no dimension": (written(tensor("t", ()), tensors=1), "tensor t has 0 dimensions"),
    "dimensions": (written(text("t"), struct.pack("<I", 1 << 31), tensors=1), "tensor t has 2147483648 dimensions"),
    "zero": (written(tensor("t", (32, 0)), tensors=1), r"tensor t of F32 has the shape \(0, 32\)"),
    "huge": (written(tensor("t", (HUGE, HUGE)), tensors=1), "tensor t has .* bytes at 0; the file has 0 for"),
    "behind": (written(tensor("t", (8,), offset=32), tensors=1, data=32), "tensor t has 32 bytes at 32; the file has"),
    "far behind": (written(tensor("t", (8,), offset=1 << 63), tensors=1, data=32), "tensor t has 32 bytes at 92233"),
    "misaligned": (written(tensor("t", (8,), offset=4), tensors=1, data=64), "which begin at multiples of 32"),
    "half a block": (written(tensor("t", (48,), kind=2), tensors=1, data=99), "rows of Q4_0 are whole blocks of 32"),
    "tensor twice": (written(tensor("t", (8,)), tensor("t", (8,)), tensors=2, data=64), "has the tensor t twice"),
    "overlap": (written(tensor("t", (16,)), tensor("u", (8,), offset=32), tensors=2, data=64), "t and u overlap"),
    "kind": (written(tensor("t", (256,), kind=10), tensors=1, data=84), "is of the kind Q2_K; allowed: F32, .*Q4_K_M"),
    "unknown kind": (written(tensor("t", (8,), kind=777), tensors=1, data=32), "the kind 777, which this version of"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused_by_what_is_wrong(name, tmp_path):
    data, told = BROKEN[name]
    (tmp_path / "b.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match=told) as error:
        settings_folder(tmp_path / "b.gguf")
    assert "b.gguf" in str(error.value)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A right file, as bytes."""
    path = tmp_path_factory.mktemp("whole") / "m.gguf"
    changes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    return write_gguf(path, "llama", tiny("LlamaConfig", "LlamaForCausalLM", **changes)).read_bytes()


def test_three_hundred_damaged_files_are_refused_or_read_and_cost_no_memory(whole, tmp_path):
    """Bytes of the header are changed, cut off or repeated, most of them in its numbers."""
    drawn, path = random.Random(0), tmp_path / "m.gguf"
    header = whole.index(b"blk.0.ffn_down.weight") + 600
    refused = list[str]()
    before = 0
    for number in range(300):
        data = bytearray(whole)
        for _ in range(drawn.choice((1, 1, 2, 5))):
            place = drawn.randrange(header)
            change = drawn.choice(("bit", "byte", "large", "cut", "again"))
            if change == "bit":
                data[place] ^= 1 << drawn.randrange(8)
            elif change == "byte":
                data[place] = drawn.randrange(256)
            elif change == "large":
                data[place : place + 8] = struct.pack("<Q", drawn.choice((HUGE, 1 << 32, (1 << 64) - 1, 1 << 40)))
            elif change == "cut":
                del data[drawn.choice((place, place + 8, len(data) - 8)) :]
            else:
                data[place:place] = data[place : place + 32]
            if len(data) < header:
                break
        path.write_bytes(data)
        try:
            for each in noted_tensors(settings_folder(path) / "gguf.json").values():
                each.read(torch.float32)
        except CheckpointError as error:
            refused.append(str(error))
        if number == 50:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert len(refused) > 200
    assert all("m.gguf" in one for one in refused)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 << 10, "KiB"


def parts_of(tmp_path: Path, **changes: Any) -> list[Path]:
    """A model in two files."""
    found = []
    for number in range(2):
        path = tmp_path / f"m-{number + 1:05}-of-00002.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_uint16("split.no", changes.get("number", number))
        writer.add_uint16("split.count", changes.get("count", 2))
        writer.add_tensor(changes.get("name", f"t{number}"), np.full(8, number, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        found.append(path)
    return found


def test_parts_are_one_model_whichever_is_named(tmp_path):
    parts = parts_of(tmp_path)
    for part in parts:
        file = read_split(part)
        assert list(file.tensors) == ["t0", "t1"]
        assert [one.path for one in file.tensors.values()] == parts


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"name": "t"}, "has the tensor t, as another part has"),
        ({"number": 0}, r"m-00002.* says that it is part 0 of 2 .*; its name says 1 of 2"),
        ({"count": 3}, r"m-00001.* says that it is part 0 of 3"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(changes, told, tmp_path):
    with pytest.raises(CheckpointError, match=told):
        read_split(parts_of(tmp_path, **changes)[0])


def test_a_missing_part_is_named(tmp_path):
    first, second = parts_of(tmp_path)
    second.unlink()
    with pytest.raises(CheckpointError, match=r"lacks m-00002-of-00002.gguf, parts of m-00001"):
        read_split(first)
    first = first.rename(tmp_path / "renamed.gguf")
    with pytest.raises(CheckpointError, match="says that it is part 0 of 2"):
        read_split(first)


def test_a_model_of_which_the_cache_of_the_hub_lacks_parts_is_not_here(tmp_path, monkeypatch):
    """So it is downloaded. Without a network the parts that are missing are named."""
    place = tmp_path / "models--me--files"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(place / "snapshots" / "a"))
    for folder in ("refs", "snapshots/a"):
        (place / folder).mkdir(parents=True)
    (place / "refs" / "main").write_text("a")
    first, second = parts_of(place / "snapshots" / "a")
    name = f"me/files/{first.name}"
    with pytest.raises(CheckpointError, match="has context_length=None"):  # which is read of whole models alone
        folder_here(name)
    second.unlink()
    assert folder_here(name) is None
    with pytest.raises(CheckpointError, match=r"lacks m-00002-of-00002.gguf, parts of m-00001"):
        resolve(name)


def test_a_file_that_becomes_shorter_is_told(whole, tmp_path):
    (tmp_path / "m.gguf").write_bytes(whole)
    tensors = noted_tensors(settings_folder(tmp_path / "m.gguf") / "gguf.json")
    last = max(tensors.values(), key=lambda one: one.begin)
    (tmp_path / "m.gguf").write_bytes(whole[: last.begin + 4])
    with pytest.raises(CheckpointError, match="the file ends within it"):
        last.read(torch.float32)
    assert read_gguf  # the header alone is still whole


def test_a_file_that_becomes_shorter_while_its_header_is_read_is_told(whole, tmp_path, monkeypatch):
    """As a file that is copied again. A map of it would end the process."""
    path = tmp_path / "m.gguf"
    monkeypatch.setattr("triolet.models.checkpoints.gguf_file._WINDOW", 64)
    path.write_bytes(whole)
    file, settings = read_gguf(path), dict[str, Any]()
    path.write_bytes(whole[:600])
    with pytest.raises(CheckpointError, match="it ends within text"):
        file.listed("tokenizer.ggml.tokens")
    path.write_bytes(whole)
    value = Header.value

    def cut(header: Any, name: str) -> Any:
        settings[name] = value(header, name)
        if len(settings) == 3:
            os.truncate(path, 100)
        return settings[name]

    monkeypatch.setattr(Header, "value", cut)
    with pytest.raises(CheckpointError, match="it has become shorter"):
        read_gguf(path)


def changed(whole: bytes, name: str, value: bytes) -> bytes:
    """The file with the bytes of a setting's value replaced by as many others."""
    place = whole.index(name.encode()) + len(name) + 4
    return whole[:place] + value + whole[place + len(value) :]


@pytest.mark.parametrize(
    ("name", "value", "kind", "told"),
    [
        ("llama.block_count", struct.pack("<I", 1 << 31), CheckpointError, "block_count=2147483648; allowed: 1, as"),
        ("llama.attention.head_count", struct.pack("<I", 0), CheckpointError, "attention.head_count=0; allowed: a wh"),
        ("general.architecture", text("llamb"), UnsupportedModel, "has the architecture 'llamb'; allowed: llama, "),
        ("llama.rope.freq_base", struct.pack("<f", float("nan")), CheckpointError, "rope.freq_base=nan; allowed"),
        ("tokenizer.ggml.pre", text("llama-xyz"), UnsupportedModel, "cut by the rule 'llama-xyz' .*; allowed: llama3"),
        ("tokenizer.ggml.model", text("t5--"), UnsupportedModel, "a vocabulary of the kind 't5--'; allowed: gpt2"),
        ("tokenizer.ggml.eos_token_id", struct.pack("<I", 999), CheckpointError, "eos_token_id=999; allowed: 0 to"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(name, value, kind, told, whole, tmp_path):
    data = changed(whole, name, value) if name != "general.architecture" else whole.replace(text("llama"), value, 1)
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(kind, match=told):
        settings_folder(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"stablelm.rope.dimension_count": "tokens"}, "layers that differ in rope.dimension_count; allowed: one"),
        ({"stablelm.rope.dimension_count": "model"}, "rope.dimension_count='gpt2'; allowed: a list"),
        ({"stablelm.use_parallel_residual": "tokens"}, "use_parallel_residual=Listed.*; allowed: true or false"),
        ({"stablelm.nextn_predict_layers": 1}, "nextn_predict_layers=1; allowed: fewer than the 1 blocks"),
        ({"stablelm.rope.freq_base": "padding_token_id"}, "rope.freq_base=0.0; allowed: a number above 0"),
        ({"tokenizer.ggml.merges": "token_type"}, "has merges .* that are not texts"),
        ({"tokenizer.ggml.scores": "tokens", "tokenizer.ggml.model": "llama"}, "320 tokens with 320 scores; download"),
    ],
)
def test_a_setting_of_another_type_is_refused(changes, told, tmp_path):
    """The value is that of a setting of the tokenizer, or a text."""
    made = tiny("StableLmConfig", "StableLmForCausalLM", num_hidden_layers=1)
    file = read_gguf(write_gguf(tmp_path / "m.gguf", "stablelm", made))
    settings = {name: file.settings.get(f"tokenizer.ggml.{other}", other) for name, other in changes.items()}
    file = evolve(file, settings={**file.settings, **settings})
    with pytest.raises((CheckpointError, UnsupportedModel), match=told):
        (read_gguf_config(file), make_tokenizer(file))


def test_the_numbers_of_a_head_are_checked(tmp_path):
    """They may be told for each layer, and follow from the width otherwise. Their factors come in two lists."""
    made = tiny("LlamaConfig", "LlamaForCausalLM", num_hidden_layers=1)

    def read(more: Any = lambda writer, _: None) -> dict[str, Any]:
        return read_gguf_config(read_gguf(write_gguf(tmp_path / "m.gguf", "minicpm", made, more=more)))

    listed = read(lambda writer, _: writer.add_array("minicpm.attention.key_length", [16]))
    assert listed["attention_multiplier"] == 0.25
    with pytest.raises(CheckpointError, match=r"has no rope_factors_short.weight; download it again"):
        read(lambda writer, _: writer.add_tensor("rope_factors_long.weight", np.ones(8, np.float32)))
    made.config.hidden_size = 1
    with pytest.raises(CheckpointError, match="embedding_length=1; allowed: 4, the heads, or more"):
        read()


def test_tokens_without_embeddings_are_refused(tmp_path):
    made = tiny("LlamaConfig", "LlamaForCausalLM", num_hidden_layers=1, vocab_size=300)
    with pytest.raises(CheckpointError, match=r"has 320 tokens, but embeddings of 300; download it again"):
        settings_folder(write_gguf(tmp_path / "m.gguf", "llama", made))


@pytest.mark.parametrize("lazily", [False, True])
def test_a_weight_of_another_shape_is_told_with_the_name_of_the_file(tmp_path, lazily):
    """Not with the folder of its settings, which nobody knows."""
    made = tiny("LlamaConfig", "LlamaForCausalLM", num_hidden_layers=1, hidden_size=32, intermediate_size=32)
    made.model.layers[0].mlp.up_proj = nn.Linear(32, 64, bias=False)
    folder = settings_folder(write_gguf(tmp_path / "m.gguf", "llama", made))
    with pytest.raises(
        CheckpointError,
        match=r"weight .*up_proj.weight' of .*m.gguf has shape \(64, 32\); its configuration asks for \(32, 32\)",
    ) as told:
        load_module("LlamaForCausalLM", folder, torch.float32, lazily=lazily)
    assert str(folder) not in str(told.value)
    made.model.layers[0].mlp.up_proj = nn.Identity()
    folder = settings_folder(write_gguf(tmp_path / "lacks.gguf", "llama", made))
    with pytest.raises(CheckpointError, match=r"lacks.gguf lacks 1 weights .*up_proj"):
        load_module("LlamaForCausalLM", folder, torch.float32, lazily=lazily)


def test_what_would_change_the_computation_and_is_not_known_is_refused(tmp_path):
    """A scale that Llama has not, and a tensor that it has not."""
    made = tiny("LlamaConfig", "LlamaForCausalLM", num_hidden_layers=1)
    path = write_gguf(tmp_path / "m.gguf", "llama", made, more=lambda writer, _: writer.add_residual_scale(0.5))
    with pytest.raises(UnsupportedModel, match="has residual_scale, which no model of transformers of this kind has"):
        settings_folder(path)
    more = lambda writer, _: writer.add_tensor("blk.0.attn_sinks.weight", np.ones(4, np.float32))  # noqa: E731
    folder = settings_folder(write_gguf(tmp_path / "n.gguf", "llama", made, more=more))
    with pytest.raises(UnsupportedModel, match=r"has the tensor blk.0.attn_sinks.weight, which LlamaForCausalLM of"):
        noted_tensors(folder / "gguf.json")
    more = lambda writer, _: writer.add_tensor("blk.0.attn_q_norm.weight", np.ones(64, np.float32))  # noqa: E731
    folder = settings_folder(write_gguf(tmp_path / "q.gguf", "llama", made, more=more))
    with pytest.raises(UnsupportedModel, match=r"q.gguf has weights .* does not have: .*self_attn.q_norm.weight"):
        load_module("LlamaForCausalLM", folder, torch.float32)
    more = lambda writer, _: writer.add_tensor("rope_freqs.weight", np.linspace(1, 9, 32).astype(np.float32))  # noqa: E731
    with pytest.raises(UnsupportedModel, match=r"factors of positions .* that are not Llama 3.1's or Gemma 4's"):
        settings_folder(write_gguf(tmp_path / "o.gguf", "llama", made, more=more))
