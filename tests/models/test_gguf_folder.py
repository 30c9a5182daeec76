"""The ways to name a GGUF file, and the settings that are made of it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from triolet import Engine, EngineConfig
from triolet.core.errors import CheckpointError
from triolet.models.architectures.conversations import replace_template
from triolet.models.architectures.prompts import settled
from triolet.models.checkpoints.files import converses, find_weights, is_mapped, resolve
from triolet.models.checkpoints.gguf_architectures import ARCHITECTURES
from triolet.models.checkpoints.gguf_file import read_gguf
from triolet.models.checkpoints.gguf_folder import _texts, settings_folder
from triolet.models.checkpoints.gguf_tensors import noted_tensors
from triolet.models.checkpoints.gguf_tokenizer import GgufTokenizer, make_tokenizer
from triolet.models.checkpoints.lengths import lengths_of
from triolet.models.checkpoints.loading import load_module, read_tokenizer
from triolet.models.checkpoints.settings import read_json
from triolet.models.checkpoints.turns import TURNS, Turns
from triolet.models.checkpoints.whisper_tokenizer import whole_tokenizer

from ..checkpoints.checkpoints import classes
from ..checkpoints.gguf_files import TEMPLATE, TOKENS, tiny, write_gguf

REAL = os.environ.get("TRIOLET_REAL", "")
TEXTS = (
    "Hello world, it's 2024 and 1234567!\n\n  def f(x):\n\treturn x  ",
    "Grüße — 你好, 日本語  🎉👩‍👧 naïve café",
    " a b  c   d    e",
    "\n\n\n<html><b>bold</b></html>\t\tx = 1.5e-10%",
)
SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "triolet" / "gguf"


@pytest.fixture(scope="module")
def made() -> Any:
    return tiny("LlamaConfig", "LlamaForCausalLM", **SMALL)


@pytest.fixture
def file(made: Any, tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return write_gguf(tmp_path / "models" / "m.gguf", "llama", made)


def pulled(root: Path, file: Path, *parts: str, **layers: str) -> None:
    """A model of Ollama with the weights of ``file``."""
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    (root / "blobs").mkdir(parents=True, exist_ok=True)
    (root / "blobs" / f"sha256-{digest}").write_bytes(file.read_bytes())
    manifest = root.joinpath("manifests", *parts)
    manifest.parent.mkdir(parents=True)
    kinds = {"model": f"sha256:{digest}", "template": "sha256:0", **layers}
    told = [{"mediaType": f"application/vnd.ollama.image.{kind}", "digest": value} for kind, value in kinds.items()]
    manifest.write_text(json.dumps({"layers": told}))


def test_a_file_a_folder_with_one_and_a_model_of_ollama_are_models(file, tmp_path, monkeypatch):
    found = resolve(file)
    assert resolve(str(file)) == resolve(file.parent) == found
    (file.parent / "mmproj-m.gguf").write_bytes(b"GGUF")
    (file.parent / "README.md").touch()
    assert resolve(file.parent) == found
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    pulled(tmp_path / "ollama", file, "registry.ollama.ai", "library", "m", "latest")
    pulled(tmp_path / "ollama", file, "hf.co", "me", "m-GGUF", "Q4_K_M")
    for name in ("ollama:m", "ollama:m:latest", "ollama:hf.co/me/m-GGUF:Q4_K_M"):
        assert read_json(resolve(name) / "config.json") == read_json(found / "config.json")
    assert [path.name for path in find_weights(found)] == ["gguf.json"]
    assert not is_mapped(found)
    assert converses(found)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("ollama:absent", "absent/latest; download the model .ollama pull absent., or set OLLAMA_MODELS"),
        ("ollama:../../x", "does not name a model of Ollama; allowed: names such as ollama:llama3.2:1b"),
        ("ollama:../a/b", "does not name a model of Ollama"),
        ("ollama:a/b/../c", "does not name a model of Ollama"),
        ("ollama:", "does not name a model of Ollama"),
        ("ollama:adapted", "has an adapter, which is not read"),
        ("ollama:without", "has no file of weights"),
    ],
)
def test_a_model_that_ollama_does_not_have_is_refused(name, told, file, tmp_path, monkeypatch):
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    pulled(tmp_path, file, "registry.ollama.ai", "library", "adapted", "latest", adapter="sha256:1")
    pulled(tmp_path, file, "registry.ollama.ai", "library", "without", "latest", model="sha256:../../etc")
    with pytest.raises(CheckpointError, match=told):
        resolve(name)


def test_a_folder_with_several_models_asks_for_one(file):
    (file.parent / "n.gguf").write_bytes(file.read_bytes())
    with pytest.raises(CheckpointError, match=r"has 2 GGUF files \(m.gguf, n.gguf\); give the path of one of them"):
        resolve(file.parent)


def test_a_folder_with_other_weights_is_the_checkpoint_that_it_was(file):
    (file.parent / "model.safetensors").touch()
    assert resolve(file.parent) == file.parent


def test_settings_are_made_once_and_those_of_other_states_go(file, made, cache):
    first = resolve(file)
    stamp = (first / "config.json").stat().st_mtime_ns
    assert resolve(file) == first
    assert (first / "config.json").stat().st_mtime_ns == stamp
    (first / "tokenizer.json").unlink()  # as a cleaner of caches may do
    assert resolve(file) == first
    assert (first / "tokenizer.json").is_file()
    with pytest.raises(CheckpointError, match="has changed since its settings were read; open it again"):
        write_gguf(file, "llama", made, words={"template": None})
        noted_tensors(first / "gguf.json")
    second = resolve(file)
    assert [path.name for path in cache.iterdir()] == [second.name]
    assert not converses(second)


def test_many_may_make_the_same_settings_at_once(file, cache):
    found = list[Path]()
    threads = [threading.Thread(target=lambda: found.append(settings_folder(file))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    assert [*cache.iterdir()] == [found[0]]
    assert read_json(found[0] / "config.json")["hidden_size"] == 32


def test_what_another_process_makes_meanwhile_stays(file, cache, monkeypatch):
    """It may be read already; and so may be what is not made whole yet."""
    made = []

    def slow(found: Any, told: Any) -> dict[str, str]:
        monkeypatch.undo()
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parents[1]))
        other = settings_folder(file)
        (cache / ".half").mkdir()
        (cache / ".half" / "gguf.json").write_bytes((other / "gguf.json").read_bytes())
        made.append(other.stat().st_ino)
        return _texts(found, told)

    monkeypatch.setattr("triolet.models.checkpoints.gguf_folder._texts", slow)
    assert settings_folder(file).stat().st_ino == made[0]
    assert len(list((cache / ".half").iterdir())) == 1


def test_a_cache_that_cannot_be_written_is_told(file, tmp_path, monkeypatch):
    (tmp_path / "full").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "full"))
    with pytest.raises(CheckpointError, match=r"cannot be written to .*; set XDG_CACHE_HOME to a folder that can be"):
        resolve(file)


def seen(tokenizer: Any) -> dict[str, Any]:
    """What an engine asks a tokenizer for before there is a text."""
    names = ("bos_token_id", "eos_token_id", "unk_token_id", "pad_token_id", "all_special_ids", "chat_template")
    return {name: getattr(tokenizer, name) for name in names} | {"lengths": lengths_of(tokenizer)}


PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *(chr(97 + one) for one in range(26))]


@pytest.mark.parametrize(
    "words",
    [{}, {"pre": "smollm", "template": None}, {"pieces": {text: -float(one) for one, text in enumerate(PIECES)}}],
)
def test_a_tokenizer_is_made_when_a_text_needs_it_and_is_transformers_own(made, tmp_path, words):
    """The tokenizer that `from_pretrained` reads from the same settings, and what is known of it before is true."""
    from transformers import AutoTokenizer

    found = resolve(write_gguf(tmp_path / "m.gguf", "llama", made, words=words))
    ours, theirs = read_tokenizer(found), AutoTokenizer.from_pretrained(str(found))
    assert seen(ours) == seen(theirs)
    assert settled(ours) is ours
    assert "whole" not in vars(ours)
    for text in (*TEXTS, "abba<own5><s></s>"):
        assert ours(text) == theirs(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert whole_tokenizer(ours) is ours.whole
    assert seen(ours.whole) == seen(theirs)
    replace_template(ours.whole, "other")
    assert ours.chat_template == "other"


def test_a_tokenizer_is_made_though_the_settings_were_removed(file):
    """They are in the user's cache, which may be emptied at any time. Another file is told."""
    first, second = (read_tokenizer(resolve(file)) for _ in range(2))
    shutil.rmtree(resolve(file))
    assert first("a").input_ids
    file.rename(file.with_suffix(".other"))
    with pytest.raises(CheckpointError, match=re.escape(str(file))):
        second("a")
    write_gguf(file, "llama", tiny("LlamaConfig", "LlamaForCausalLM", 9, num_hidden_layers=1))
    with pytest.raises(CheckpointError, match="has changed since it was opened"):
        second("a")
    file.with_suffix(".other").rename(file)
    assert second("a").input_ids


def test_a_thread_that_reads_a_model_does_not_wait_for_one_that_waits_for_it(file, monkeypatch):
    """The first text of a model comes while another model is read, whose tokenizer is then needed, too."""
    first, second = (read_tokenizer(resolve(file)) for _ in range(2))
    done, waits, wait = list[Any](), threading.Event(), Turns._wait
    asks = threading.Thread(target=lambda: done.append(first.whole), daemon=True)

    def told(turns: Turns, thread: int) -> None:
        if thread == asks.ident:
            waits.set()
        wait(turns, thread)

    monkeypatch.setattr(Turns, "_wait", told)

    def reads() -> None:
        with TURNS.turn():
            asks.start()
            waits.wait(20)
            done.append(second.whole)

    thread = threading.Thread(target=reads, daemon=True)
    thread.start()
    thread.join(20)
    asks.join(20)
    assert len(done) == 2, "the threads wait for each other"
    assert done == [second.whole, first.whole]


@pytest.mark.parametrize("words", [{"prompt": "ab"}, {"prompt_token_ids": [4, 5]}])
def test_the_event_loop_does_not_make_the_tokenizer(file, monkeypatch, words):
    """All other requests would wait for it, though the text is short or only written."""
    threads, make = list[int](), GgufTokenizer._whole

    def seen_making(tokenizer: GgufTokenizer) -> Any:
        threads.append(threading.get_ident())
        return make(tokenizer)

    monkeypatch.setattr(GgufTokenizer, "_whole", seen_making)

    async def main() -> str:
        async with Engine(file, config=EngineConfig(device="cpu")) as engine:
            return (await engine.generate(**words, max_tokens=2)).text

    trio.run(main)
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_the_settings_say_how_texts_begin_and_end(file):
    found = resolve(file)
    tokenizer = read_tokenizer(found)
    assert tokenizer("abba<own5>").input_ids == [1, *tokenizer.convert_tokens_to_ids(["ab", "b", "a", "<own5>"])]
    assert tokenizer.decode(tokenizer("é 12").input_ids, skip_special_tokens=True) == "é 12"
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "<s>[user]a"
    assert len(tokenizer) == TOKENS
    assert read_json(found / "generation_config.json")["eos_token_id"] == [2]


def test_tokens_that_are_never_written_are_known(made, tmp_path):
    def more(writer: Any, config: Any) -> None:
        writer.add_array("tokenizer.ggml.suppress_tokens", [5, 7])

    found = resolve(write_gguf(tmp_path / "m.gguf", "llama", made, more=more))
    assert read_json(found / "generation_config.json")["suppress_tokens"] == [5, 7]


def test_a_token_of_which_merges_would_be_sought_for_hours_is_refused(made, tmp_path):
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "a" * (1 << 20)]
    words = {"pieces": dict.fromkeys(pieces, 0.0)}
    with pytest.raises(CheckpointError, match=r"m.gguf has a token of 1048576 characters; allowed: 4096"):
        settings_folder(write_gguf(tmp_path / "m.gguf", "llama", made, words=words))


def test_a_vocabulary_of_sentencepiece_merges_by_scores(made, tmp_path):
    """The best token first, whatever the order in the file; bytes for what has no token."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "c", "▁a", "ab", "bc"]
    pieces += ["▁ab", "abc", "▁abc"]
    scores = [0.0] * 259 + [-9.0, -10.0, -11.0, -12.0, -4.0, -5.0, -3.0, -6.0, -2.0, -1.0]
    path = tmp_path / "s.gguf"
    write_gguf(path, "llama", made, words={"pieces": dict(zip(pieces, scores, strict=True))})
    found, _, _ = make_tokenizer(read_gguf(path))
    encoded = {text: found.encode(text).tokens for text in ("abc", "ab abc", "b é", "cab<s>a")}
    assert encoded == {
        "abc": ["<s>", "▁abc"],
        "ab abc": ["<s>", "▁ab", "▁abc"],
        "b é": ["<s>", "▁", "b", "▁", "<0xC3>", "<0xA9>"],
        "cab<s>a": ["<s>", "▁", "c", "ab", "<s>", "▁a"],
    }
    assert found.decode(found.encode("ab é abc").ids) == "ab é abc"


def test_a_vocabulary_of_gemma_4_merges_as_transformers_does(made, tmp_path):
    """In the order of the file, whatever the scores, across words and lines; and texts begin with BOS."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abc\n", "<turn|>"]
    merges = ["▁ a", "b c", "a b", "▁a bc", "c ▁", "\n \n", "▁ ▁"]
    pieces += [merge.replace(" ", "") for merge in merges]
    path = tmp_path / "s.gguf"
    write_gguf(path, "llama", made, words={"pieces": dict.fromkeys(pieces, 0.0), "merges": merges})
    found, _, ends = make_tokenizer(read_gguf(path))
    theirs = classes().GemmaTokenizer(
        {text: one for one, text in enumerate(pieces)}, [tuple(one.split(" ")) for one in merges]
    )
    for text in ("abc abc", "c a  b\n\n\nab é", "cabc "):
        assert found.encode(text).ids == [1, *theirs.backend_tokenizer.encode(text, add_special_tokens=False).ids]
        assert found.decode(found.encode(text).ids) == text
    assert ends == [2, pieces.index("<turn|>")]


def test_a_message_of_gpt_oss_does_not_end_its_text(made, tmp_path):
    """Elsewhere the same token does."""
    marks = ["<|end|>", "<|return|>", "<|call|>"]
    for count, ends in ((1, [2, 262]), (3, [2, 263, 264])):
        path = write_gguf(tmp_path / f"{count}.gguf", "llama", made, words={"own": marks[:count]})
        assert make_tokenizer(read_gguf(path))[2] == ends


@pytest.mark.real
@pytest.mark.skipif(not REAL, reason="TRIOLET_REAL names no folder")
def test_a_real_file_is_its_checkpoint():
    """SmolLM2's file and its checkpoint: the same weights, the same tokens of texts."""
    from safetensors.torch import load_file

    found, folder = resolve(Path(REAL) / "SmolLM2-135M-Instruct.Q4_1.gguf"), Path(REAL) / "smollm2"
    ours, theirs = read_tokenizer(found), read_tokenizer(folder)
    for text in TEXTS:
        assert ours(text).input_ids == theirs(text).input_ids
    module = load_module("LlamaForCausalLM", found, torch.float32)
    for key, weight in load_file(folder / "model.safetensors").items():
        assert torch.equal(module.state_dict()[key], weight), key


@pytest.mark.real
@pytest.mark.skipif(not REAL, reason="TRIOLET_REAL names no folder")
def test_a_real_file_of_several_kinds_is_what_transformers_reads():
    """gemma-3-270m's: transformers has its own way from the file to tokens and weights."""
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    path = Path(REAL) / "gemma3-270m.gguf"
    ours = read_tokenizer(resolve(path))
    architecture, told, _ = get_gguf_tokenizer(str(path))
    theirs, _ = convert_gguf_tokenizer(architecture, told)
    for text in TEXTS:
        assert ours(text).input_ids == [2, *theirs.encode(text).ids]


def test_the_documents_list_the_architectures_that_are_read():
    text = (Path(__file__).parents[2] / "docs" / "text.md").read_text(encoding="utf-8")
    table = text[text.index("| `general.architecture` |") :].split("\n\n", 1)[0].splitlines()[2:]
    assert sorted(re.findall("`([^`]+)`", "".join(line.split("|")[1] for line in table))) == sorted(ARCHITECTURES)


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("deepseek-v3", ["123", "45", " it", "'s", " कि", " ", "你好", "abc", " .", "foo", " !!\n\n", " x"]),
        ("qwen35", ["1", "2", "3", "4", "5", " it", "'s", " कि", " 你好abc", " .", "foo", " !!\n\n", " x"]),
        (
            "deepseek-llm",
            ["12345", " it", "'", "s", " ", "कि", " ", "你好", "abc", " .", "foo", " !!", "\n", "\n", " x"],
        ),
        (
            "deepseek-coder",
            [*"12345", " it", "'", "s", " ", "क", "ि", " ", "你好", "abc", " .", "foo", " !!", "\n", "\n", " x"],
        ),
        ("kimi-k2", ["123", "45", " it's", " कि", " ", "你好", "abc", " .", "foo", " !!\n\n", " x"]),
        ("seed-coder", [*"12345", " it", "'s", " क", "ि", " 你好abc", " .", "foo", " !!", "\n\n", " x"]),
        ("tiny_aya", ["12", "345", " it's", " कि", " 你好abc", " .", "foo", " !!\n\n", " x"]),
        ("exaone-moe", [*"12345", " it", "'s", " कि 你好abc", " .", "foo", " !!\n", "\n", " x"]),
        ("jais-2", ["123", "45", " it", "'s", " क", "ि", " 你好abc", " .", "foo", " !!\n\n", " x"]),
        ("afmoe", ["12", "345", " it", "'s", " कि", " ", "你好", "abc", " .", "foo", " !!\n\n", " x"]),
        ("minimax-m2", ["123", "45", " it's", " कि", " 你好abc", " .", "foo", " !!\n\n", " x"]),
    ],
)
def test_texts_are_cut_by_the_rule_of_the_vocabulary(pre, pieces, made, tmp_path):
    """As llama.cpp's rules of these names do."""
    found, _, _ = make_tokenizer(read_gguf(write_gguf(tmp_path / "m.gguf", "llama", made, words={"pre": pre})))
    text = "12345 it's कि 你好abc .foo !!\n\n x"
    cut = [text[start:end] for _, (start, end) in found.pre_tokenizer.pre_tokenize_str(text)]
    assert cut == pieces
