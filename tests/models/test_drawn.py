"""Configurations of 2025 and 2026, drawn from transformers' own classes: each opens, and writes what transformers
writes, or is refused by the name of its layer or setting. No error of transformers or torch comes through, not even in
the words of a refusal."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from triolet.core.config import EngineConfig
from triolet.core.errors import CheckpointError, UnsupportedModel
from triolet.core.request import Pooling
from triolet.models.blueprints.estimate import ODDS, estimate
from triolet.models.blueprints.opened import TRIED, TRIED_ENCODERS, table_of_opened
from triolet.models.executor import TorchExecutor
from triolet.models.native.decoders import MODEL_TYPES
from triolet.models.native.encoders import MODEL_TYPES as ENCODER_TYPES
from triolet.models.native.library import Library

from ..checkpoints.checkpoints import random_model, rewrite
from ..checkpoints.drawn import draw_model, tiny_config, write_config
from ..checkpoints.words import LLAMA
from .texts import Driver, Job, generate, noise

OPENED = (
    *("afmoe", "apertus", "arcee", "bitnet", "cohere2_moe", "cohere_compass_text", "cwm", "exaone_moe", "flex_olmo"),
    *("hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax", "internlm3", "iquestcoder", "jais2", "kolibri1"),
    *("laguna", "mellum", "minimax_m2", "minimax_m3_vl_text", "ministral", "modernbert-decoder", "nanochat", "phimoe"),
    *("solar_open", "vaultgemma"),
    *("bamba", "falcon_h1", "granitemoehybrid", "lfm2", "lfm2_moe", "lfm3", "mamba2", "nemotron_h", "qwen3_5_moe_text"),
    *("olmo_hybrid", "qwen3_5_text", "qwen3_next", "axk1", "flint", "granite_swa", "granitemoe_swa", "longcat_flash"),
    "mistral4",
)
OPENED_ELSEWHERE = (  # other tests compare these in every run
    *("cohere2", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "gemma3_text", "glm4", "glm4_moe", "granite"),
    *("granitemoeshared", "helium", "ministral3", "olmo3", "qwen3", "qwen3_moe", "seed_oss", "smollm3"),
    *("deepseek_v3", "gemma4_text", "gemma4_unified_text", "glm4_moe_lite", "gpt_oss", "minicpm3", "youtu"),
)
VECTORS = (
    "albert",
    "embedding_gemma2_text",
    "eurobert",
    "gte",
    "jina_embeddings_v3",
    "modernbert",
    "nomic_bert",
    "ultrabert",
)
_STATE = "need a state of the request beside its pages"
_FAMILY = "would need a family of its own"
_CHOOSES = "need attention to positions that each row chooses"

BY_SETTINGS = {
    **dict.fromkeys(("bailing_hybrid", "inkling_text", "minimax", "zaya"), _STATE),
    **dict.fromkeys(("jamba", "kimi_linear"), "with a decay for each of its numbers, or each number of a key"),
    **dict.fromkeys(("lfm3_vl", "minicpm_ocr", "minicpmv4_6"), _FAMILY),
    **dict.fromkeys(("axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4", "mistral_large4", "qwen4_exp_text"), _CHOOSES),
    "deepseek_v4": "need keys and values that stand for several positions",
    "llama4_text": "need attention within chunks of positions",
    "unlimited_ocr": "need windows that always show the first positions",
    **dict.fromkeys(("dots3_note_text", "step3p7"), "layers that differ in"),
    "gemma3n": _FAMILY,
    **dict.fromkeys(("aya_vision", "cohere2_vision", "deepseek_ocr2", "exaone4_5", "fast_vlm"), _FAMILY),
    **dict.fromkeys(("granite4_vision", "hunyuan_vl"), _FAMILY),
    **dict.fromkeys(("kimi_k25", "molmo2", "ovis2"), _FAMILY),
    **dict.fromkeys(("perception_lm", "video_llama_3"), _FAMILY),
    **dict.fromkeys(("csm", "musicflamingo", "pocket_tts", "qwen2_5_omni", "qwen3_omni_moe", "vibevoice"), _FAMILY),
    "florence2": "encoder-decoder",
    "lasr_ctc": "LasrForCTC",
    "t5gemma2": "encoder-decoder",
}
"""Model types that config.json alone refuses, and words of the refusal. One that opens now goes to `OPENED`."""

BY_WEIGHTS = {
    "mimo_v2_flash": "value_dim",
    "doge": "asks for a mask of its own",
    "diffllama": "layer 0 asks for attention after",
    "hrm_text": "layer 0 asks for attention after",
    "openai_privacy_filter": "attention",
}
"""Model types that a comparison refuses, and words of the refusal."""

_FOREIGN = re.compile(r"\b\w*(?<!Checkpoint)(Error|Exception)\b")
_CONFIG = EngineConfig(dtype="float32", device="cpu", max_positions=64, page_size=4)


@pytest.fixture
def draw(tmp_path: Path) -> Iterator[Callable[..., tuple[Any, Driver]]]:
    """``draw(kind)``: a model of transformers, and the engine's driver for its checkpoint."""
    executors = list[TorchExecutor]()

    def start(kind: str, model: Any = None) -> tuple[Any, Driver]:
        model = model or draw_model(kind)
        model.save_pretrained(tmp_path)
        LLAMA.make().save_pretrained(tmp_path)
        executors.append(TorchExecutor(tmp_path, _CONFIG))
        return model, Driver(executors[-1], executors[-1].open())

    yield start
    for executor in executors:
        executor.close()


def test_sixty_configurations_are_drawn() -> None:
    assert len({*OPENED, *OPENED_ELSEWHERE, *VECTORS, *BY_SETTINGS, *BY_WEIGHTS}) >= 60


def test_the_table_of_what_opens_is_made_of_the_code() -> None:
    """`python -c "from triolet.models.blueprints.opened import table_of_opened; print(table_of_opened())"`."""
    assert {*OPENED, *OPENED_ELSEWHERE} - MODEL_TYPES == TRIED
    assert {*VECTORS} - ENCODER_TYPES == TRIED_ENCODERS
    assert table_of_opened() in (Path(__file__).parents[2] / "docs/features.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "kind", [*OPENED, *(pytest.param(kind, marks=pytest.mark.thorough) for kind in OPENED_ELSEWHERE)]
)
def test_a_drawn_decoder_writes_what_transformers_writes(draw: Callable[..., Any], tmp_path: Path, kind: str) -> None:
    model, driver = draw(kind)
    native = driver.executor._open.parts.network.native is not None
    assert native == (kind in MODEL_TYPES and Library.load() is not None)
    if native:
        thought, found = estimate(tmp_path, _CONFIG).by_owner, driver.executor.memory().by_owner
        assert found["weights"] - 10_000 <= thought["weights"] - ODDS
        assert found["native"] <= thought["native"]
    jobs = [Job(prompt=noise(length, length), chunk=7, max_tokens=8) for length in (5, 30)]
    assert [one.tokens for one in driver.run(*jobs)] == [generate(model, job.prompt, 8) for job in jobs]


@pytest.mark.parametrize("kind", VECTORS)
def test_a_drawn_encoder_gives_what_transformers_gives(draw: Callable[..., Any], kind: str) -> None:
    model, driver = draw(kind)
    jobs = [Job(prompt=noise(length, length), pooling=Pooling(kind="mean")) for length in (5, 30)]
    for job, result in zip(jobs, driver.run(*jobs), strict=True):
        told = model(torch.tensor([job.prompt])).last_hidden_state[0].mean(0).tolist()
        assert result.vector == pytest.approx(told, abs=1e-4)


def test_an_encoder_of_texts_within_a_larger_model_is_opened(draw: Callable[..., Any], tmp_path: Path) -> None:
    """Without its encoders of images and audio, a checkpoint of EmbeddingGemma 2 has the settings of texts apart."""
    text = tiny_config("embedding_gemma2_text").to_dict()
    config = transformers.EmbeddingGemma2Config(text_config=text, vision_config=None, audio_config=None)
    model, driver = draw("embedding_gemma2", random_model(transformers.EmbeddingGemma2Model, config, 0))
    (result,) = driver.run(Job(prompt=noise(9, 1), pooling=Pooling(kind="mean")))
    told = model(torch.tensor([noise(9, 1)])).last_hidden_state[0].mean(0).tolist()
    assert result.vector == pytest.approx(told, abs=1e-4)


@pytest.mark.parametrize("kind", BY_SETTINGS)
def test_a_drawn_configuration_is_refused_by_name_before_weights_are_looked_for(tmp_path: Path, kind: str) -> None:
    with pytest.raises(UnsupportedModel, match=re.escape(BY_SETTINGS[kind])) as refusal:
        TorchExecutor(write_config(kind, tmp_path), _CONFIG).open()
    assert not _FOREIGN.search(str(refusal.value))


@pytest.mark.parametrize("kind", BY_WEIGHTS)
def test_a_drawn_model_is_refused_by_name(draw: Callable[..., Any], kind: str) -> None:
    with pytest.raises((UnsupportedModel, CheckpointError), match=re.escape(BY_WEIGHTS[kind])) as refusal:
        draw(kind)
    assert not _FOREIGN.search(str(refusal.value))


def test_a_model_of_several_models_of_texts_is_refused(tmp_path: Path) -> None:
    folder = write_config("musicgen", tmp_path)
    rewrite(folder / "config.json", architectures=["MusicgenForConditionalGeneration"])
    with pytest.raises(UnsupportedModel, match="has more than one model of texts; allowed: one"):
        TorchExecutor(folder, _CONFIG).open()


def test_an_architecture_that_needs_a_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers has classes in its place that tell what is missing when they are asked for anything."""

    class Missing(type):
        def __getattribute__(cls, name: str) -> Any:
            raise ImportError("Qwen3ForCausalLM requires the torchaudio library")

    folder = write_config("qwen3", tmp_path)
    monkeypatch.setattr(transformers, "Qwen3ForCausalLM", Missing("Qwen3ForCausalLM", (), {}))
    with pytest.raises(UnsupportedModel, match=r"a package that is not installed: .*torchaudio"):
        TorchExecutor(folder, _CONFIG).open()
