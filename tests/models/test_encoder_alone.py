"""An executor with the encoder alone: it lends what the whole model would, holds nothing else, and is estimated so."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from attrs import evolve
from safetensors.torch import load_file, save_file

from triolet.core.config import EngineConfig, Speculation
from triolet.core.errors import CheckpointError, InvalidRequest
from triolet.core.model import ModelDescription
from triolet.core.plan import StepPlan
from triolet.core.request import EncoderItem
from triolet.models.architectures.crossed import crossed_model_types, find_crossed_family
from triolet.models.architectures.families import _families
from triolet.models.blueprints.estimate import ODDS, estimate
from triolet.models.checkpoints.parts import leaving_out
from triolet.models.checkpoints.stored import StoredTensor
from triolet.models.executor import TorchExecutor
from triolet.models.memory.resources import storages
from triolet.models.native.library import Library
from triolet.testing.families import FAMILIES
from triolet.testing.frame_families import FRAME_MAKERS

from .media import items_of
from .texts import SMALL, encode_job, start_of

ENCODERS = {  # the parts that encode, as transformers names them
    "qwen2_vl": ("model.visual.",),
    "qwen2_5_vl": ("model.visual.",),
    "llava": ("model.vision_tower.", "model.multi_modal_projector."),
    "idefics3": ("model.vision_model.", "model.connector."),
    "smolvlm": ("model.vision_model.", "model.connector."),
    "qwen2_audio": ("model.audio_tower.", "model.multi_modal_projector."),
    **dict.fromkeys(
        (
            "qwen3_asr",
            "qwen3_aligner",
            "glmasr",
            "audioflamingo3",
            "moss_transcribe_diarize",
            "voxtral",
            "voxtral_realtime",
            "fun_asr_nano",
        ),
        ("model.audio_tower.", "model.multi_modal_projector."),
    ),
    "vibevoice_asr": (
        "model.acoustic_tokenizer_encoder.",
        "model.semantic_tokenizer_encoder.",
        "model.multi_modal_projector.",
    ),
    "kyutai_speech_to_text": ("codec_model.", "codes.", "begin", "offsets"),
    **dict.fromkeys(("granite_speech", "granite_speech_plus"), ("model.encoder.", "model.projector.")),
    "phi4_multimodal": ("audio_embed.",),
    "moonshine": ("model.encoder.",),
    "moonshine_streaming": ("model.encoder.",),
    "cohere_asr": ("model.encoder.",),
    "canary": ("model.encoder.",),
    "parakeet_ctc": ("encoder.",),
    "granite_speech5": ("encoder.", "ctc_head."),  # whose weights the encoder has, too
    **dict.fromkeys(("parakeet_rnnt", "parakeet_tdt", "nemotron_asr_streaming"), ("encoder.", "encoder_projector.")),
    "nemotron3_5_asr": ("encoder.", "encoder_projector.", "prompt_projector."),
    "bart": ("model.encoder.",),
    "t5": ("encoder.",),
}
EMBEDDINGS = ("shared.weight", "embed_tokens.weight", "lm_head.weight")
ALONE = evolve(SMALL, part="encoder")
NATIVE = set() if Library.load() is None else {"native"}
Opens = Callable[..., tuple[TorchExecutor, ModelDescription]]
Folder = Callable[[str], Path]


def lent(executor: TorchExecutor, job: EncoderItem) -> list[tuple[tuple[int, ...], str, bytes]]:
    """What is lent of a job, as values."""
    executor.encode((job,))
    output = executor.take_out(job.key)
    executor.free((job.key,))
    return [(array.shape, array.dtype, array.data.tobytes()) for array in output.arrays]


def named(executor: TorchExecutor) -> dict[str, torch.Tensor]:
    """Its module's tensors by name; one that is shared under each of its names."""
    module = executor._open.main.model.module
    found = dict(module.named_parameters(remove_duplicate=False))
    return {**found, **dict(module.named_buffers(remove_duplicate=False))}


def encoders_share(executor: TorchExecutor, name: str) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in named(executor).items() if key.startswith(ENCODERS[name])}


def bytes_of(tensors: dict[str, torch.Tensor]) -> int:
    return sum(storage.nbytes() for storage in storages(tensors.values()).values())


def check_alone(name: str, path: Path, opens: Opens, config: EngineConfig = SMALL) -> TorchExecutor:
    """That the encoder alone lends what the whole model does, and has its encoder's weights and no more."""
    (whole, description), (alone, told) = opens(path, config), opens(path, evolve(config, part="encoder"))
    for item in items_of(name, path, description):
        assert lent(alone, item) == lent(whole, item), "bit for bit"
    share, held = encoders_share(whole, name), named(alone)
    assert type(alone._open.main.model.module) is type(whole._open.main.model.module)
    assert held.keys() == share.keys()
    assert all(torch.equal(tensor, share[key]) for key, tensor in held.items())
    counts = alone.memory().by_owner
    assert counts.pop("encoder_states", 0) == 0
    assert counts == {"weights": bytes_of(share), "encoder_outputs": 0, "rule_masks": 0}
    has_all = name == "granite_speech5"  # its head is a part of its encoder
    assert has_all or counts["weights"] < whole.memory().by_owner["weights"]
    assert (told.pages, told.cross_slots) == (0, 0)
    same = {"pages": description.pages, "cross_slots": description.cross_slots, "structures": None}
    ours = evolve(told, **same, processor_identity=description.processor_identity)
    assert ours == evolve(description, structures=None), "all else is as the whole model's"
    return alone


def check_estimate(path: Path, alone: TorchExecutor) -> None:
    """That what it holds was estimated, without its decoder."""
    thought, held = estimate(path, ALONE).by_owner, alone.memory().by_owner["weights"]
    assert held - 10_000 <= thought["weights"] - ODDS <= held * 1.2  # BART's shared embedding counts
    assert (thought["self_kv"], thought["cross_kv"]) == (0, 0)
    assert thought["encoder_outputs"] == ALONE.encoder_cache_bytes


def test_every_family_with_an_encoder_is_tried() -> None:
    assert set(_families()) <= ENCODERS.keys()
    kinds = {type(find_crossed_family(name)) for name in crossed_model_types()}
    crossed = ENCODERS.keys() - {*_families(), *FRAME_MAKERS, "qwen3_aligner"}
    assert {type(find_crossed_family(name)) for name in crossed} == kinds
    assert ENCODERS.keys() >= FRAME_MAKERS.keys()


@pytest.mark.parametrize("name", ENCODERS)
def test_the_encoder_alone_lends_what_the_whole_model_does_and_holds_nothing_else(
    name: str, opens: Opens, folder: Folder, request: pytest.FixtureRequest
) -> None:
    if name == "t5":  # the whole model packs its token embeddings, which are the decoder's, too
        request.getfixturevalue("without_native")
    check_estimate(folder(name), check_alone(name, folder(name), opens))


@pytest.mark.parametrize("name", ["bart", "t5"])
@pytest.mark.parametrize("stored_as", ["shared", "decoder.embed_tokens", "encoder.embed_tokens"])
def test_token_embeddings_that_encoder_and_decoder_share_are_found_under_any_name(
    name: str, stored_as: str, opens: Opens, folder: Folder, tmp_path: Path, without_native: None
) -> None:
    """Which of its names the one tensor has depends on what saved it."""
    check_alone(name, shared(name, stored_as, folder, tmp_path), opens)


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_token_embeddings_that_are_packed_for_the_decoder_encode_the_same(
    name: str, opens: Opens, folder: Folder, tmp_path: Path
) -> None:
    path = shared(name, "shared", folder, tmp_path)
    (whole, description), (alone, _) = opens(path, SMALL), opens(path, evolve(SMALL, part="encoder"))
    for item in items_of(name, path, description):
        assert lent(alone, item) == lent(whole, item), "bit for bit"


def shared(name: str, stored_as: str, folder: Folder, target: Path) -> Path:
    """A checkpoint whose encoder and decoder share their token embeddings."""
    path = copied(folder(name), target)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    weights = load_file(path / "model.safetensors")
    embedding, *_ = [weights.pop(key) for key in list(weights) if key.endswith(EMBEDDINGS)]
    prefix = "model." if name == "bart" else ""
    save_file({**weights, f"{prefix}{stored_as}.weight": embedding}, path / "model.safetensors", {"format": "pt"})
    return path


def copied(path: Path, target: Path) -> Path:
    for file in path.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


@pytest.mark.parametrize("name", ENCODERS)
def test_the_decoders_weights_are_not_read(
    name: str, opens: Opens, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    pieces = StoredTensor.pieces
    monkeypatch.setattr(StoredTensor, "pieces", lambda stored: (read.append(stored.name), pieces(stored))[1])
    opens(folder(name), ALONE)
    shared = ("shared.weight", "final_logits_bias", "embed_tokens.embed_tokens.weight")  # the second: a few bytes
    parts = [part.removeprefix("model.") for part in ENCODERS[name]]
    assert read
    assert [one for one in read if not any(part in one for part in parts) and not one.endswith(shared)] == []


def test_transformers_takes_what_leaves_parts_out_for_its_own() -> None:
    """Else it would not rename the weights of older checkpoints."""
    made = leaving_out(transformers.LlavaForConditionalGeneration, lambda _: [])
    assert not made.is_custom_code()
    assert made.__name__ == "LlavaForConditionalGeneration"


def test_a_weight_of_the_encoder_that_is_missing_is_told(folder: Folder, tmp_path: Path) -> None:
    path = copied(folder("llava"), tmp_path)
    weights = load_file(path / "model.safetensors")
    lost = next(key for key in weights if "vision_tower" in key)
    del weights[lost]
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    executor = TorchExecutor(path, ALONE)
    with pytest.raises(CheckpointError, match="lacks 1 weights"):
        executor.open()
    assert executor.memory().total == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"quantization": "int8"},
        {"dtype": "bfloat16"},
        {"compile": True},
        {"device": "auto", "devices": ("cpu", "cpu")},
        {"graphs": "eager"},
    ],
)
def test_settings_of_the_decoder_change_nothing_in_the_encoder(
    changes: dict[str, Any], opens: Opens, folder: Folder
) -> None:
    """A lender has the settings of its borrowers."""
    config, path = evolve(SMALL, **changes), folder("llava")
    whole, description = opens(path, evolve(config, compile=False, graphs="off"))
    alone, _ = opens(path, evolve(config, part="encoder"))
    for item in items_of("llava", path, description):
        assert lent(alone, item) == lent(whole, item)
    assert alone.memory().by_owner["weights"] == bytes_of(encoders_share(whole, "llava"))


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_whispers_encoder_is_held_alone(
    quantization: str | None, opens: Opens, checkpoint: Path, reference: Any, audio: Any
) -> None:
    config = evolve(SMALL, quantization=quantization, dtype="float32")
    (whole, description), (alone, told) = opens(checkpoint, config), opens(checkpoint, evolve(config, part="encoder"))
    job = encode_job(description, "k", audio(1))
    assert lent(alone, job) == lent(whole, job)
    if quantization is None:
        check_estimate(checkpoint, alone)
    counts = alone.memory().by_owner
    assert counts.keys() == {"weights", "features", "encoder_outputs", "rule_masks", *NATIVE}
    layers, width = reference.config.encoder_layers, reference.config.d_model
    values = sum(weight.numel() for weight in reference.model.encoder.parameters()) + layers * width
    if quantization is None and not NATIVE:
        assert counts["weights"] == values * 4, "keys have a bias of zeros here"
    assert counts["weights"] < whole.memory().by_owner["weights"]
    assert (told.pages, told.cross_slots, told.encoder_bytes) == (0, 0, description.encoder_bytes)


def test_the_draft_models_encoder_goes_along(opens: Opens, checkpoint: Path, audio: Any) -> None:
    config = evolve(SMALL, speculation=Speculation(draft=str(checkpoint)))
    (whole, description), (alone, _) = opens(checkpoint, config), opens(checkpoint, evolve(config, part="encoder"))
    job = encode_job(description, "k", audio(1))
    assert len(lent(alone, job)) == 2
    assert lent(alone, job) == lent(whole, job)
    assert alone.memory().by_owner["draft_weights"] == alone.memory().by_owner["weights"]


@pytest.mark.parametrize("keep_weights", [True, False])
@pytest.mark.parametrize("name", ["whisper", "bart", "llava"])
def test_it_sleeps_and_wakes(
    name: str, keep_weights: bool, opens: Opens, folder: Folder, checkpoint: Path, audio: Any
) -> None:
    path = checkpoint if name == "whisper" else folder(name)
    alone, description = opens(path, ALONE)
    before = alone.memory().by_owner
    job = encode_job(description, "k", audio(1)) if name == "whisper" else items_of(name, path, description)[0]
    awake = lent(alone, job)
    alone.sleep(keep_weights=keep_weights)
    assert alone.memory().total == (before["weights"] if keep_weights else 0)
    alone.wake()
    assert alone.memory().by_owner == before
    assert lent(alone, job) == awake


@pytest.mark.parametrize("name", sorted({*FAMILIES} - ENCODERS.keys() - FRAME_MAKERS.keys()))
def test_a_model_without_an_encoder_is_refused(name: str, folder: Folder) -> None:
    executor = TorchExecutor(folder(name), ALONE)
    told = r"part='encoder' is given for \w+, which has no encoder.*allowed: .*encoders=0"
    with pytest.raises(InvalidRequest, match=told):
        executor.open()
    assert executor.memory().total == 0


def test_a_sequence_is_not_started(opens: Opens, checkpoint: Path) -> None:
    alone, _ = opens(checkpoint, ALONE)
    plan = StepPlan(step_id=1, epoch=0, started=(start_of(1, (1,)),), ended=(), cross_writes=(), chunks=())
    with pytest.raises(AssertionError, match="sequence 1: an encoder generates no tokens"):
        alone.step(plan)
