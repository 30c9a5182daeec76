"""Checkpoints: every layout that works, and what each broken one is told."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from transformers import Gemma4TextConfig, WhisperForConditionalGeneration

from triolet.core.errors import CheckpointError, UnsupportedModel
from triolet.core.request import LogitRules, Probe
from triolet.models.architectures.text_checkpoint import read_text_checkpoint
from triolet.models.checkpoints.files import find_weights, resolve
from triolet.models.checkpoints.settings import FileSettings
from triolet.models.checkpoints.whisper_checkpoint import check_architecture, read_checkpoint
from triolet.models.executor import TorchExecutor
from triolet.models.speech.whisper_speech import special_tokens

from ..checkpoints.checkpoints import rewrite


@pytest.fixture
def copy(checkpoint, tmp_path):
    """A copy of the checkpoint to break."""
    return shutil.copytree(checkpoint, tmp_path / "copy")


def greedy(driver, job, audio, ids):
    driver.encode(clip=audio(1))
    return driver.run(job(key="clip", prompt=(ids.start, ids.en, ids.transcribe), max_tokens=12))[0].tokens


def test_what_is_read(checkpoint, driver, ids):
    """The description names the model's limits and special tokens."""
    found, tokens = driver.description, special_tokens(driver.description)
    assert (found.architecture, found.vocabulary_size, found.max_positions) == (
        "WhisperForConditionalGeneration",
        368,
        64,
    )
    assert (found.encoder_embeddings, found.encoder_bytes, found.window_samples) == (100, 100 * 48 * 4, 32_000)
    assert (found.eos_token_ids, found.suppress_token_ids, found.begin_suppress_token_ids) == (
        (256,),
        (1, 2, 3),
        (32, 256),
    )
    assert (tokens.start_id, tokens.no_timestamps_id, tokens.timestamp_begin_id) == (257, 266, 267)
    assert (tokens.previous_id, tokens.no_speech_id, tokens.max_initial_timestamp) == (264, 265, 20)
    assert tokens.language_ids == {"en": 258, "de": 259, "es": 260}
    assert tokens.task_ids == {"transcribe": 262, "translate": 261}
    assert found.tokenizer.decode(found.tokenizer.encode("Hi", add_special_tokens=False)) == "Hi"


def test_without_generation_config_the_vocabulary_tells(copy):
    """Older checkpoints lack generation_config.json: the same tokens are found by their texts."""
    whole = read_checkpoint(copy)
    (copy / "generation_config.json").unlink()
    derived = read_checkpoint(copy)
    for name in ("start_id", "no_timestamps_id", "previous_id", "no_speech_id", "language_ids", "task_ids"):
        assert getattr(derived.tokens, name) == getattr(whole.tokens, name), name
    assert derived.tokens.max_initial_timestamp == 50
    assert derived.eos_token_ids == (256,)
    assert derived.suppress_token_ids == ()


@pytest.mark.parametrize(("written", "read"), [(None, ()), ([], ()), ([-1], ()), ([5, 6], (5, 6))])
def test_suppress_tokens_as_they_are_written(copy, written, read):
    """``None``, an empty list and [-1] all mean that nothing is suppressed."""
    rewrite(copy / "generation_config.json", suppress_tokens=written)
    assert read_checkpoint(copy).suppress_token_ids == read


def test_config_suppresses_only_without_a_generation_config(copy):
    """As in transformers, a generation_config.json without such a list suppresses nothing, whatever config.json has."""
    rewrite(copy / "config.json", suppress_tokens=[5, 6], begin_suppress_tokens=[7])
    rewrite(copy / "generation_config.json", "suppress_tokens", "begin_suppress_tokens")
    found = read_checkpoint(copy)
    assert (found.suppress_token_ids, found.begin_suppress_token_ids) == ((), ())
    (copy / "generation_config.json").unlink()
    found = read_checkpoint(copy)
    assert (found.suppress_token_ids, found.begin_suppress_token_ids) == ((5, 6), (7,))


def test_suppressed_tokens_outside_the_vocabulary_are_left_out(open_driver, copy, job, audio, ids):
    """As in transformers they suppress nothing. config.json's defaults, 220 and 50256, are of this kind."""
    outside = {"suppress_tokens": [1, 368, 50_256], "begin_suppress_tokens": [220, 50_256]}
    rewrite(copy / "generation_config.json", **outside)
    driver = open_driver(copy)
    found = driver.description
    assert (found.suppress_token_ids, found.begin_suppress_token_ids) == ((1,), (220,))
    driver.encode(clip=audio(1))
    rules = LogitRules(suppress=found.suppress_token_ids, begin_suppress=found.begin_suppress_token_ids)
    assert driver.run(job(key="clip", prompt=(ids.start, ids.en), rules=rules, max_tokens=3))[0].tokens
    (copy / "generation_config.json").unlink()
    rewrite(copy / "config.json", "begin_suppress_tokens")
    assert read_checkpoint(copy).begin_suppress_token_ids == (220,)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"decoder_start_token_id": 368}, "decoder_start_token_id of .*generation_config.json is 368"),
        ({"decoder_start_token_id": -1}, "decoder_start_token_id of .* is -1"),
        ({"eos_token_id": 5000}, "eos_token_id of .* is 5000"),
        ({"eos_token_id": [256, 5000]}, "eos_token_id of .* is 5000"),
        ({"lang_to_id": {"<|en|>": 99_999}}, r"<\|en\|> of lang_to_id of .* is 99999"),
        ({"task_to_id": {"transcribe": 368}}, "transcribe of task_to_id of .* is 368"),
        ({"no_timestamps_token_id": 100_000}, "no_timestamps_token_id of .* is 100000"),
        ({"no_timestamps_token_id": 367}, r"<\|0.00\|>, which is no_timestamps_token_id \+ 1, is 368"),
        ({"prev_sot_token_id": 368}, "prev_sot_token_id of .* is 368"),
    ],
    ids=str,
)
def test_tokens_outside_the_vocabulary_are_told(copy, change, told):
    """The setting, the id and the vocabulary are named when the checkpoint is read, not in the middle of a step."""
    rewrite(copy / "generation_config.json", **change)
    with pytest.raises(
        CheckpointError, match=rf"{told}; allowed: a token id from 0 to 367, .*vocab_size=368.*config.json"
    ):
        read_checkpoint(copy)


def test_a_missing_end_of_text_is_the_tokenizers(copy):
    """Where no file names it; without the token too, no text would ever end."""
    rewrite(copy / "generation_config.json", "eos_token_id")
    rewrite(copy / "config.json", eos_token_id=None)
    assert read_checkpoint(copy).eos_token_ids == (256,)
    for path in (copy / "tokenizer.json", copy / "tokenizer_config.json"):
        path.write_text(path.read_text().replace("<|endoftext|>", "<|theend|>"))
    with pytest.raises(CheckpointError, match=r"neither eos_token_id in .* nor a token <\|endoftext\|>"):
        read_checkpoint(copy)


def test_a_list_of_ends_is_kept_whole_and_never_empty(copy):
    """Each of them ends a text."""
    rewrite(copy / "generation_config.json", eos_token_id=[256, 46])
    assert read_checkpoint(copy).eos_token_ids == (256, 46)
    rewrite(copy / "generation_config.json", eos_token_id=[])
    with pytest.raises(CheckpointError, match=r"eos_token_id=\[\]; allowed: a token id"):
        read_checkpoint(copy)


@pytest.mark.parametrize("listed", [False, True])
def test_english_only_checkpoints_have_no_languages(copy, listed):
    """``is_multilingual: false``: no language and no task tokens, although the files name them."""
    rewrite(copy / "generation_config.json", is_multilingual=False)
    if not listed:
        rewrite(copy / "generation_config.json", "lang_to_id", "task_to_id")
    tokens = read_checkpoint(copy).tokens
    assert (tokens.language_ids, tokens.task_ids) == ({}, {})


SIZES = ["d_model", "vocab_size", "num_mel_bins", "max_source_positions", "max_target_positions"]
SIZES += [f"{part}_{what}" for part in ("encoder", "decoder") for what in ("layers", "attention_heads", "ffn_dim")]
DAMAGE = {
    "config.json": {
        **dict.fromkeys(SIZES, (None, "x", 0, -1)),
        "architectures": ("x", 1, [1]),
        **dict.fromkeys(["activation_function", "tie_word_embeddings"], ("x", [])),
    },
    "generation_config.json": {
        **dict.fromkeys(["lang_to_id", "task_to_id"], (None, "x", 0, [1], {"en": None}, {"en": "x"})),
        **dict.fromkeys(
            ["decoder_start_token_id", "no_timestamps_token_id", "prev_sot_token_id"], ("x", [], 1.5, True)
        ),
        **dict.fromkeys(["suppress_tokens", "begin_suppress_tokens"], ("x", {}, ["x"], [None])),
        "eos_token_id": ("x", {}, ["x"], [None]),
        "max_initial_timestamp_index": (-1, "x", 1.5),
        "is_multilingual": ("x", 0),
    },
    "preprocessor_config.json": {
        **dict.fromkeys(["feature_size", "sampling_rate", "hop_length", "chunk_length"], (None, "x", 0, -1, 1.5, [])),
        "n_fft": (None, "x", 0, 1, 32_001),
    },
    "processor_config.json": {"feature_extractor": (None, "x", 0)},
}


@pytest.mark.parametrize(("file", "setting"), [(file, name) for file, names in DAMAGE.items() for name in names])
def test_damaged_settings_are_told_by_file_and_name(copy, config, file, setting):
    """Null, text, zero or a fraction where something else belongs: no raw TypeError or ZeroDivisionError."""
    path, values = copy / file, DAMAGE[file][setting]
    if file == "processor_config.json":
        (copy / "preprocessor_config.json").unlink()
        path.write_text("{}")
    whole = path.read_text()
    for value in values:
        rewrite(path, **{setting: value})
        with pytest.raises(CheckpointError) as caught:
            TorchExecutor(copy, config()).open()
        assert setting in str(caught.value), value
        assert file in str(caught.value) or isinstance(caught.value, UnsupportedModel), value
        path.write_text(whole)


def test_feature_settings_of_a_processor_config(copy):
    """transformers 5 may write them into processor_config.json; without any, the model's sizes tell."""
    settings = json.loads((copy / "preprocessor_config.json").read_text())
    (copy / "preprocessor_config.json").unlink()
    (copy / "processor_config.json").write_text(json.dumps({"feature_extractor": settings}))
    assert read_checkpoint(copy).features.chunk_length == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_stored_half_precision_is_cast(open_driver, copy, job, audio, ids, dtype):
    """A checkpoint stored in half precision computes in float32 what its rounded weights give."""
    path = copy / "model.safetensors"
    rounded = {name: tensor.to(dtype) for name, tensor in load_file(path).items()}
    save_file(rounded, path, metadata={"format": "pt"})
    driver = open_driver(copy)
    found = greedy(driver, job, audio, ids)
    save_file({name: tensor.float() for name, tensor in rounded.items()}, path, metadata={"format": "pt"})
    other = open_driver(copy)
    assert found == greedy(other, job, audio, ids)


@pytest.mark.parametrize("layout", ["sharded", "unprefixed", "pickled", "pickled of old"])
def test_other_layouts_of_the_same_weights(
    open_driver, checkpoint, copy, save, reference, job, audio, ids, tmp_path, layout
):
    """Shards, names without ``model.`` and pytorch_model.bin, also in the format that was no zip archive, give the same
    tokens and the same identity."""
    path = copy / "model.safetensors"
    tensors = load_file(path)
    path.unlink()
    if layout == "sharded":
        reference.save_pretrained(copy, max_shard_size="200KB")
        assert len(find_weights(copy)) > 1
    elif layout == "unprefixed":
        save_file(
            {name.removeprefix("model."): tensor for name, tensor in tensors.items()}, path, metadata={"format": "pt"}
        )
        rewrite(copy / "config.json", architectures=["WhisperModel"])
    else:
        torch.save(tensors, copy / "pytorch_model.bin", _use_new_zipfile_serialization=layout == "pickled")
    driver, plain = open_driver(copy), open_driver(checkpoint)
    assert greedy(driver, job, audio, ids) == greedy(plain, job, audio, ids)
    assert driver.description.processor_identity == plain.description.processor_identity


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_the_head_is_the_files_own(open_driver, copy, job, audio, features, ids, tied, own):
    """Where proj_out.weight is there it is used, whatever tie_word_embeddings says, as in transformers; where it equals
    the embedding, one tensor serves as both."""
    path = copy / "model.safetensors"
    tensors = load_file(path)
    embedding = tensors["model.decoder.embed_tokens.weight"]
    tensors["proj_out.weight"] = embedding.flip(0).contiguous() if own else embedding.clone()
    save_file(tensors, path, metadata={"format": "pt"})
    rewrite(copy / "config.json", tie_word_embeddings=tied)
    driver, everything = open_driver(copy), tuple(range(ids.vocabulary))
    held = driver.executor._open.parts.model.module
    assert (held.proj_out.packed is held.decoder.embed_tokens.weight) is not own
    model, prompt = WhisperForConditionalGeneration.from_pretrained(copy), (ids.start, ids.en)
    with torch.inference_mode():
        expected = model(features(audio(1)), decoder_input_ids=torch.tensor([prompt])).logits[0, 1].log_softmax(-1)
    driver.encode(clip=audio(1))
    one = job(key="clip", prompt=prompt, probe=Probe(position=1, token_ids=everything), max_tokens=1)
    torch.testing.assert_close(torch.tensor(driver.run(one)[0].probes[0]), expected, atol=1e-4, rtol=1e-5)


def test_an_untied_head_that_is_missing_is_told(open_driver, copy):
    """The embedding must not take its place without a word: transformers would draw a random one."""
    rewrite(copy / "config.json", tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"tie_word_embeddings=false, but there is no weight 'proj_out.weight'"):
        open_driver(copy)


def test_identities_differ_between_models_and_dtypes(open_driver, checkpoint, save, make, tmp_path):
    """Two models, or one in two dtypes, never share a content key."""
    other = save(tmp_path, make(seed=9))
    found = {
        open_driver(folder, dtype=dtype).description.processor_identity
        for folder in (checkpoint, other)
        for dtype in ("float32", "bfloat16")
    }
    assert len(found) == 4


def remove_weights(folder):
    (folder / "model.safetensors").unlink()


def damage_weights(folder):
    (folder / "model.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00 not a header")


def damage_pickle(folder):
    remove_weights(folder)
    (folder / "pytorch_model.bin").write_bytes(b"not a pickle")


def drop_tensor(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.encoder.conv2.bias"]
    save_file(tensors, folder / "model.safetensors")


def reshape_tensor(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.encoder.conv2.bias"] = torch.zeros(7)
    save_file(tensors, folder / "model.safetensors")


def lose_shard(folder):
    remove_weights(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')


@pytest.mark.parametrize(
    ("breakage", "told"),
    [
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / "adapter_config.json").write_text("{}"), "is an adapter.*Merge the adapter"),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot be read"),
        (lambda folder: (folder / "config.json").write_text("[]"), "holds a list"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "the tokenizer of .* cannot be used"),
        (lambda folder: (folder / "tokenizer.json").unlink(), r"tokenizer of .* knows only \d+ of the \d+ tokens"),
        (lambda folder: rewrite(folder / "config.json", d_model="wide"), "a whole number"),
        (lambda folder: rewrite(folder / "config.json", decoder_attention_heads=5), "5 heads"),
        (
            lambda folder: rewrite(folder / "preprocessor_config.json", feature_size=128),
            "128 mel bands",
        ),
        (
            lambda folder: rewrite(folder / "preprocessor_config.json", chunk_length=30),
            "3000 frames",
        ),
        (remove_weights, "no weights; allowed: model.safetensors"),
        (damage_weights, "cannot be read"),
        (damage_pickle, "as safetensors"),
        (drop_tensor, "no weight 'encoder.conv2.bias'"),
        (reshape_tensor, r"shape \(7,\); config.json asks for \(48,\)"),
        (lose_shard, "lacks the shards model-00001-of-00002"),
    ],
)
def test_broken_checkpoints_are_told_what_is_wrong(open_driver, copy, breakage, told):
    """Each breakage has its own sentence; nothing stays allocated."""
    breakage(copy)
    with pytest.raises(CheckpointError, match=told):
        open_driver(copy)


@pytest.mark.parametrize(
    "change",
    [{"model_type": "bert"}, {"architectures": ["WhisperForAudioClassification"]}, {"activation_function": "bent"}],
    ids=str,
)
def test_other_architectures_are_refused(open_driver, copy, change):
    """What was found and what is allowed are both named."""
    rewrite(copy / "config.json", **change)
    with pytest.raises(UnsupportedModel, match="allowed") as caught:
        open_driver(copy)
    assert str(next(iter(change.values()))).strip("[]'") in str(caught.value)


def test_layers_that_differ_in_more_than_their_heads_are_refused(tmp_path):
    """transformers' own error came, which names no model."""
    differing = {0: {"intermediate_size": 64}, 1: {"head_dim": 64}}
    Gemma4TextConfig(architectures=["Gemma4ForCausalLM"], per_layer_config=differing).save_pretrained(tmp_path)
    with pytest.raises(
        UnsupportedModel, match=r"\(gemma4_text\) has layers that differ in intermediate_size; allowed: decoders"
    ):
        read_text_checkpoint(FileSettings.read_if_there(tmp_path / "config.json"))


def test_names_that_lead_nowhere(tmp_path, monkeypatch):
    """A missing folder, a file, and a hub id that cannot be had offline."""
    with pytest.raises(CheckpointError, match="there is no folder"):
        resolve(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="there is no folder"):
        resolve("/a/b/c")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        resolve(tmp_path / "file")

    def offline(name, allow_patterns):
        raise OSError("no route to the hub")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(CheckpointError, match="no route to the hub"):
        resolve("openai/whisper-none")
    with pytest.raises(CheckpointError, match="did you mean openai/whisper-base"):
        resolve("base")


@pytest.mark.parametrize(
    ("name", "begin", "kind", "told"),
    [
        ("a.gguf", b"GGUF\3\0", CheckpointError, "a.gguf is a damaged GGUF file: it ends within its version; downloa"),
        (
            "ggml-base.bin",
            b"lmgg",
            CheckpointError,
            "ggml-base.bin is a damaged whisper.cpp file: it ends within its si",
        ),
        ("model.safetensors", b"", CheckpointError, "model.safetensors is a file; .*; give its folder, /"),
        ("config.json", b"{}", CheckpointError, "config.json is a file; .*; give its folder, /"),
        (
            "notes.txt",
            b"GG",
            CheckpointError,
            r"notes.txt is a file; allowed: a checkpoint's folder or a .*0.6B', or a file of GGUF or whisper.cpp$",
        ),
    ],
)
def test_a_file_in_place_of_a_checkpoint_is_told_what_it_is(name, begin, kind, told, tmp_path):
    (tmp_path / name).write_bytes(begin)
    with pytest.raises(kind, match=told):
        resolve(tmp_path / name)


@pytest.mark.parametrize("pickled", [False, True])
def test_a_hub_id_is_fetched_without_needless_files(tmp_path, monkeypatch, pickled):
    """Weights in safetensors are preferred; pickles are only fetched where there are none."""
    asked = []

    def download(name, allow_patterns):
        asked.append(allow_patterns)
        (tmp_path / ("pytorch_model.bin" if pickled else "model.safetensors")).write_text("")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve("someone/whisper") == tmp_path
    assert len(asked) == (2 if pickled else 1)
    assert not any("bin" in pattern for pattern in asked[0])


def test_a_file_on_the_hub_may_have_the_signs_of_patterns_in_its_name(tmp_path, monkeypatch):
    files, asked = ["a[1]-00001-of-00002.gguf", "a[1]-00002-of-00002.gguf", "a1-00001-of-00002.gguf"], []

    def download(name, allow_patterns):
        asked.extend(filter_repo_objects(files, allow_patterns=allow_patterns))
        (tmp_path / files[0]).write_bytes(b"GGUF")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(CheckpointError, match=r"lacks a\[1\]-00002-of-00002.gguf"):
        resolve(f"me/files/{files[0]}")
    assert asked == files[:2]


@pytest.mark.real_time
def test_light_checks_need_no_torch(checkpoint):
    """A bad path is told before torch is imported."""
    code = (
        "import sys; from triolet.models.checkpoints.files import find_weights, read_config, resolve;"
        "from triolet.models.checkpoints.whisper_checkpoint import check_architecture;"
        "folder = resolve(sys.argv[1]); check_architecture(folder); find_weights(folder);"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(checkpoint)], check=True)
    assert check_architecture(checkpoint)["model_type"] == "whisper"
