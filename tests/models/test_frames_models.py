"""CTC models and transducers: what is refused when they open, what they hold, and their encoders."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from tokenizers import Tokenizer
from tokenizers.decoders import Metaspace
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from triolet import EngineConfig, InvalidRequest, UnsupportedModel
from triolet.api.speech.words import split_words
from triolet.core.config import Speculation
from triolet.core.speech import Ask
from triolet.models.architectures.frontends import PairedDeltaMel
from triolet.models.executor import TorchExecutor

from ..checkpoints.frame_families import FRAME_MAKERS
from .texts import SMALL

NAMES = tuple(FRAME_MAKERS)


def noise(samples: int) -> np.ndarray[Any, Any]:
    return (np.random.default_rng(samples).standard_normal(samples) * 0.3).astype(np.float32)


@pytest.mark.parametrize("name", NAMES)
def test_an_item_has_as_many_frames_as_its_encoder_makes(name: str, opens: Any, folder: Any) -> None:
    """Alone and beside others, of every length about a frame's border; the longest has as many as a slot."""
    executor, description = opens(folder(name))
    lengths = (2_000, 16_000, 16_159, 16_160, 17_280, 17_281, 17_440, 30_000, description.window_samples)
    jobs = [description.preparer.prepare((), audio=[noise(length)]).items[0] for length in lengths]
    executor.encode(tuple(jobs))
    for job in jobs:
        output = executor._open.outputs.get(job.key)
        assert len(output) == job.embeddings <= description.encoder_embeddings
        assert output.nbytes == job.size == output.untyped_storage().nbytes()
    assert jobs[-1].embeddings == description.encoder_embeddings
    executor.free((jobs[1].key,))
    beside = executor._open.outputs.get(jobs[2].key).clone()
    executor.free((jobs[2].key,))
    executor.encode((jobs[2],))
    torch.testing.assert_close(executor._open.outputs.get(jobs[2].key), beside, rtol=1e-4, atol=1e-4)


def test_a_page_is_the_state_of_a_sequence_however_long(opens: Any, folder: Any) -> None:
    _, description = opens(folder("parakeet_tdt"), EngineConfig(device="cpu", dtype="float32", max_running=3))
    assert description.pages == 3
    assert pickle.loads(pickle.dumps(description.speech)).facts == description.speech.facts


@pytest.mark.parametrize(
    ("name", "settings", "told"),
    [
        ("parakeet_tdt", {"model_type": "nemotron3_5_transcribe"}, "decoder is a language model with Mamba layers"),
        ("parakeet_tdt", {"durations": [0, 2, 4]}, r"durations=\[0, 2, 4\]; allowed: 0, 1, 2 and so on"),
        ("parakeet_rnnt", {"blank_token_id": 9_999}, "blank_token_id=9999; allowed: 0 to 268, the vocabulary"),
        ("parakeet_ctc", {"quantization_config": {"quant_method": "fp8"}}, "quantized weights; allowed: float weights"),
    ],
)
def test_a_checkpoint_that_cannot_be_read_is_refused_by_name(
    name: str, settings: dict[str, Any], told: str, changed: Callable[..., Path]
) -> None:
    with pytest.raises(Exception, match=told) as refused:
        TorchExecutor(changed(name, **settings), SMALL).open()
    assert isinstance(refused.value, UnsupportedModel) or "blank_token_id" in settings


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"speculation": Speculation()}, "speculation is given for ParakeetForTDT, which reads frames"),
        ({"kv_dtype": "float16"}, "kv_dtype='float16', but .* it reads frames"),
        ({"chat_template": "{{ messages }}"}, "chat_template is given for ParakeetForTDT"),
    ],
)
def test_settings_of_other_models_are_refused(settings: dict[str, Any], told: str, folder: Any) -> None:
    with pytest.raises(InvalidRequest, match=told):
        TorchExecutor(folder("parakeet_tdt"), EngineConfig(device="cpu", dtype="float32", **settings)).open()


def test_the_features_of_granite_speech_5_are_those_of_torchaudio() -> None:
    """The numbers of transformers' feature extractor with torchaudio 2.11, for a sine of 440 Hz and an odd hop."""
    samples = np.sin(2 * np.pi * 440 * np.arange(1_761) / 16_000).astype(np.float32)
    rows = PairedDeltaMel()(samples)
    assert rows.shape == (6, 320)
    expected = [[1.4784813, 0.7002544, -0.2579604, 1.5150421], [0.9137613, 0.1441605, 0.6409289, 1.7517205]]
    torch.testing.assert_close(rows[[0, 5]][:, [0, 79, 80, 177]], torch.tensor(expected), atol=1e-4, rtol=1e-4)
    assert float(rows.sum()) == pytest.approx(428.9017, abs=0.01)


@pytest.mark.parametrize("when", ["before", "after"])
def test_nothing_lives_on_when_opening_fails(
    when: str, registrations: Callable[..., list[str]], books: Any, folder: Any
) -> None:
    executor = TorchExecutor(folder("parakeet_tdt"), SMALL)
    owners = registrations(executor, "own", when)
    assert {"weights", "self_kv", "cross_kv"} <= {*owners}


def test_a_language_that_the_model_writes_is_no_text(opens: Any, folder: Any) -> None:
    _, description = opens(folder("nemotron3_5_asr"))
    description.tokenizer.add_tokens(["<pt-BR>"])
    tag = description.tokenizer.convert_tokens_to_ids("<pt-BR>")
    speech = description.speech
    assert speech.cut((70, tag, 71), Ask(language=None)).language == "pt"
    assert speech.cut((70, 71), Ask(language=None)).language is None
    assert speech.decode((70, tag, 71)) == speech.decode((70, 71))
    assert not speech.is_text(tag)


def test_words_of_sentencepiece_keep_the_blank_before_them(opens: Any, folder: Any) -> None:
    """Its decoder drops the first one of a text, but parts of a text are joined without a separator."""
    _, description = opens(folder("parakeet_tdt"))
    vocabulary = {"▁th": 0, "e": 1, "▁cat": 2}
    made = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    made.decoder = Metaspace()
    speech = evolve(
        description.speech, model=evolve(description, tokenizer=PreTrainedTokenizerFast(tokenizer_object=made))
    )
    assert speech.decode((0, 1, 2)) == " the cat"
    assert [word.text for word in split_words((0, 1, 2), speech.decode, "en")] == [" the", " cat"]
