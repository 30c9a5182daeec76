"""Checkpoints: every layout that works, and what each broken one is told."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from triolet.core.errors import CheckpointError, UnsupportedModel
from triolet.models.checkpoint import check_architecture, find_weights, read_checkpoint, resolve


@pytest.fixture
def copy(checkpoint, tmp_path):
    """A copy of the checkpoint to break."""
    return shutil.copytree(checkpoint, tmp_path / "copy")


def rewrite(path, change):
    settings = json.loads(path.read_text())
    change(settings)
    path.write_text(json.dumps(settings))


def greedy(driver, job, audio, ids):
    driver.encode(clip=audio(1))
    return driver.run(job(key="clip", prompt=(ids.start, ids.en, ids.transcribe), max_tokens=12))[0].tokens


def test_what_is_read(checkpoint, driver, ids):
    """The description names the model's limits and special tokens."""
    found, tokens = driver.description, driver.description.whisper
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
    rewrite(copy / "generation_config.json", lambda settings: settings.update(suppress_tokens=written))
    assert read_checkpoint(copy).suppress_token_ids == read


def test_english_only_checkpoints_have_no_languages(copy):
    """``is_multilingual: false``: no language and no task tokens, although the vocabulary has them."""

    def english(settings):
        settings["is_multilingual"] = False
        del settings["lang_to_id"], settings["task_to_id"]

    rewrite(copy / "generation_config.json", english)
    tokens = read_checkpoint(copy).tokens
    assert (tokens.language_ids, tokens.task_ids) == ({}, {})


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


@pytest.mark.parametrize("layout", ["sharded", "unprefixed", "pickled"])
def test_other_layouts_of_the_same_weights(
    open_driver, checkpoint, copy, save, reference, job, audio, ids, tmp_path, layout
):
    """Shards, names without ``model.`` and pytorch_model.bin give the same tokens and the same identity."""
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
        rewrite(copy / "config.json", lambda settings: settings.update(architectures=["WhisperModel"]))
    else:
        torch.save(tensors, copy / "pytorch_model.bin")
    driver, plain = open_driver(copy), open_driver(checkpoint)
    assert greedy(driver, job, audio, ids) == greedy(plain, job, audio, ids)
    assert driver.description.processor_identity == plain.description.processor_identity


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


def cut_weights(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


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


def empty_index(folder):
    remove_weights(folder)
    (folder / "model.safetensors.index.json").write_text("{}")


@pytest.mark.parametrize(
    ("breakage", "told"),
    [
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot be read"),
        (lambda folder: (folder / "config.json").write_text("[]"), "holds a list"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "tokenizer.json or a file beside it"),
        (lambda folder: rewrite(folder / "config.json", lambda s: s.update(d_model="wide")), "cannot be used"),
        (lambda folder: rewrite(folder / "config.json", lambda s: s.update(decoder_attention_heads=5)), "5 heads"),
        (
            lambda folder: rewrite(folder / "preprocessor_config.json", lambda s: s.update(feature_size=128)),
            "128 mel bands",
        ),
        (
            lambda folder: rewrite(folder / "preprocessor_config.json", lambda s: s.update(chunk_length=30)),
            "3000 frames",
        ),
        (remove_weights, "no weights; allowed: model.safetensors"),
        (damage_weights, "cannot be read"),
        (cut_weights, "cannot be read"),
        (damage_pickle, "as safetensors"),
        (drop_tensor, "no weight 'encoder.conv2.bias'"),
        (reshape_tensor, r"shape \(7,\); config.json asks for \(48,\)"),
        (lose_shard, "lacks the shards model-00001-of-00002"),
        (empty_index, "no weight_map"),
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
    rewrite(copy / "config.json", lambda settings: settings.update(change))
    with pytest.raises(UnsupportedModel, match="allowed") as caught:
        open_driver(copy)
    assert str(next(iter(change.values()))).strip("[]'") in str(caught.value)


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


def test_light_checks_need_no_torch(checkpoint):
    """A bad path is told before torch is imported."""
    code = (
        "import sys; from triolet.models.checkpoint import check_architecture, find_weights, resolve;"
        "folder = resolve(sys.argv[1]); check_architecture(folder); find_weights(folder);"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(checkpoint)], check=True)
    assert check_architecture(checkpoint)["model_type"] == "whisper"
