"""Keys and values in 16 bits: half of the bytes by every account, nearly the same numbers, and a refusal where torch
computes."""

from __future__ import annotations

import functools

import pytest
import torch
from attrs import evolve

from triolet.core.config import EngineConfig
from triolet.core.errors import InvalidRequest, UnsupportedModel
from triolet.core.request import Alignment
from triolet.models.blueprints.estimate import estimate
from triolet.models.executor import TorchExecutor
from triolet.models.native.library import Library
from triolet.models.native.runner import Runner

from ..checkpoints.families import make_checkpoint
from .test_alignment import run_alignments

SIXTEEN = pytest.mark.parametrize("kv_dtype", ["float16", "bfloat16"])
NATIVE = pytest.mark.skipif(Library.load() is None, reason="installed without a compiler")


@pytest.fixture(scope="session")
def folder(tmp_path_factory, checkpoint):
    """``folder(family)``: a tiny checkpoint of it, which nobody changes."""
    make = functools.cache(lambda family: make_checkpoint(family, tmp_path_factory.mktemp(family)))
    return lambda family: checkpoint if family == "whisper" else make(family)


def kept(executor):
    """Bytes of keys and values, by owner."""
    return {owner: count for owner, count in executor.memory().by_owner.items() if owner.endswith("_kv")}


# -- bytes -------------------------------------------------------------------------------------------------------------


@NATIVE
@SIXTEEN
@pytest.mark.parametrize("family", ["llama", "whisper", "bart"])
def test_keys_and_values_take_half_of_the_bytes(books, open_driver, folder, family, kv_dtype):
    """As counted, as measured, and as estimated; also after a sleep."""
    config = EngineConfig(device="cpu", dtype="float32", max_running=8, page_size=4, kv_dtype=kv_dtype)
    plain, driver = open_driver(folder(family)), open_driver(folder(family), kv_dtype=kv_dtype)
    assert driver.description.pages == plain.description.pages
    assert driver.description.cross_slots == plain.description.cross_slots
    for owner, count in kept(driver.executor).items():
        assert 2 * count == kept(plain.executor)[owner] == 2 * estimate(folder(family), config).by_owner[owner]
    held = driver.executor.memory().by_owner
    driver.executor.sleep(keep_weights=True)
    driver.executor.wake()
    assert driver.executor.memory().by_owner == held


# -- numbers -----------------------------------------------------------------------------------------------------------


@NATIVE
@SIXTEEN
def test_words_are_aligned_by_keys_of_16_bits(open_driver, checkpoint, audio, ids, kv_dtype):
    tokens = (ids.start, ids.en, ids.transcribe, ids.no_timestamps, 72, 105, 104, 111, ids.eos)
    found = []
    for each in ("auto", kv_dtype):
        driver = open_driver(checkpoint, kv_dtype=each)
        driver.encode(a=audio(1))
        found += run_alignments(driver, [("a", tokens, Alignment(start=4, frames=100))])
    frames, others = (torch.tensor(one.frames) for one in found)
    assert int((frames - others).abs().median()) <= 2
    assert found[1].logprobs == pytest.approx(found[0].logprobs, abs=20 * torch.finfo(getattr(torch, kv_dtype)).eps)


@NATIVE
@SIXTEEN
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_a_comparison_finds_what_is_wrong_in_16_bits_alone(open_driver, folder, monkeypatch, family, kv_dtype):
    """The library is compared with pages of each format that it has."""
    step = Runner.step

    def wrong(runner, *given, **options):
        found = step(runner, *given, **options)
        for pages in runner._held[4] or ():
            if pages.dtype != torch.float32:
                pages.mul_(1.5)  # as if the exponent were another
        return found

    monkeypatch.setattr(Runner, "step", wrong)
    with pytest.raises(UnsupportedModel, match=f"by the native library with keys and values in {kv_dtype}"):
        open_driver(folder(family), kv_dtype=kv_dtype)
    assert open_driver(folder(family)).description.pages


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "changes", "why"),
    [
        (
            "llama",
            {"dtype": "float16", "kv_dtype": "bfloat16"},
            "it computes in float16; .*: kv_dtype='float16'",
        ),
        ("llama", {"graphs": "eager"}, "graphs='eager'; allowed"),
        ("bert", {}, "BertModel is an encoder, which keeps no keys and values; allowed"),
        ("bart", {"dtype": "float16", "kv_dtype": "float32"}, "it computes in float16"),
        ("whisper", {"dtype": "float16", "kv_dtype": "float32"}, "it computes in float16"),
    ],
)
def test_where_torch_computes_another_dtype_is_refused(folder, family, changes, why):
    """Before the weights are read, so an estimate refuses, too."""
    config = EngineConfig(**{"device": "cpu", "dtype": "float32", "kv_dtype": "float16", **changes})
    with pytest.raises(InvalidRequest, match=f"^kv_dtype='{config.kv_dtype}', but (.*: )?{why}.* or 'auto'$"):
        TorchExecutor(folder(family), config).open()
    with pytest.raises(InvalidRequest, match=why):
        estimate(folder(family), config)


@pytest.mark.parametrize("family", ["llama", "bart", "whisper"])
def test_without_the_library_another_dtype_is_refused(without_native, folder, family):
    config = EngineConfig(device="cpu", dtype="float32", kv_dtype="float16")
    with pytest.raises(InvalidRequest, match=r"installed without a compiler; allowed: kv_dtype='float32'"):
        TorchExecutor(folder(family), config).open()
    executor = TorchExecutor(folder(family), evolve(config, kv_dtype="float32", max_running=1))
    executor.open()
    executor.close()


@NATIVE
@pytest.mark.parametrize(("family", "kind"), [("llama", "CausalDecoder"), ("t5", "CrossedDecoder")])
def test_a_decoder_that_is_no_program_is_refused(monkeypatch, folder, family, kind):
    """Which is known when its module is there."""
    name = "decoders" if kind == "CausalDecoder" else "crossed_decoder"
    monkeypatch.setattr(f"triolet.models.native.{name}.{kind}.unknown", lambda _: "it is unknown")
    with pytest.raises(InvalidRequest, match="does not compute the model: it is unknown; allowed"):
        TorchExecutor(folder(family), EngineConfig(device="cpu", kv_dtype="bfloat16")).open()
