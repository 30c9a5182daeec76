"""Speech models whose processors need further packages: features, prompts and adapters are made without these."""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from triolet.core.config import EngineConfig
from triolet.core.errors import CheckpointError, InvalidRequest, UnsupportedModel
from triolet.core.model import ModelDescription
from triolet.core.speech import Ask
from triolet.models.architectures.text_checkpoint import read_text_checkpoint
from triolet.models.blueprints.read import read_blueprint
from triolet.models.checkpoints.loading import read_tokenizer
from triolet.models.checkpoints.settings import FileSettings

from ..checkpoints.checkpoints import rewrite
from ..checkpoints.families import make_checkpoint
from .media import Checkpoint, picture, sound
from .towers import REQUESTS, TOWERS, beside, features

Opened = Callable[[str], Checkpoint]


@pytest.fixture(params=list(TOWERS))
def checkpoint(request: pytest.FixtureRequest, opened: Opened) -> Checkpoint:
    return opened(request.param)


@pytest.fixture
def granite(tmp_path: Path) -> Path:
    return make_checkpoint("granite_speech", tmp_path)


# -- features and prompts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [401, 8000, 16_117, 32_000, 50_123])
def test_features_and_tokens_are_transformers_own(samples: int, checkpoint: Checkpoint) -> None:
    item = sound(samples)
    prompt = f"hear {checkpoint.placeholder} this"
    prepared = checkpoint.prepare(prompt, [item])
    expected = features(checkpoint.name, checkpoint.folder, item)
    payload = prepared.items[0].payload
    for name, values in expected.items():
        torch.testing.assert_close(payload[name], values, atol=2e-5, rtol=1e-4)
    assert list(prepared.token_ids) == checkpoint.process(prompt, [item])["input_ids"][0].tolist()


def test_other_settings_give_another_key(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = make_checkpoint(checkpoint.name, tmp_path)
    name = {"voxtral": "padding_value", "fun_asr_nano": "frame_shift"}.get(checkpoint.name, "hop_length")
    rewrite(folder / "preprocessor_config.json", **{name: 8})
    other = Checkpoint.open(checkpoint.name, folder)
    one, changed = (each.prepare(each.placeholder, [sound(9000)]).items[0].key for each in (checkpoint, other))
    assert one != changed


def test_settings_within_a_processors_are_read(tmp_path: Path) -> None:
    """transformers saves them so since 5.0."""
    folder = make_checkpoint("fun_asr_nano", tmp_path)
    plain = folder / "preprocessor_config.json"
    within = {"feature_extractor": {**json.loads(plain.read_text()), "sampling_rate": 8000}}
    (folder / "processor_config.json").write_text(json.dumps(within))
    assert Checkpoint.open("fun_asr_nano", folder).preparer.sampling_rate == 8000


@pytest.mark.parametrize(
    ("name", "samples", "told"),
    [
        ("voxtral", 0, "0 samples; allowed: 1 or more"),
        ("granite_speech_plus", 256, "256 samples; allowed: 257 or more, float32 at 16000 Hz"),
        ("fun_asr_nano", 399, "399 samples; allowed: 400 to 64719"),
        ("phi4_multimodal", 399, "399 samples; allowed: 400 or more, float32 at 16000 Hz"),
        ("fun_asr_nano", 80_000, r"allowed: 400 to 64719 \(.* seconds\), float32 at 16000 Hz. Cut longer audio"),
    ],
)
def test_audio_that_the_encoder_cannot_read_is_refused(name: str, samples: int, told: str, opened: Opened) -> None:
    with pytest.raises(InvalidRequest, match=told):
        opened(name).prepare(TOWERS[name], [sound(samples)])


def test_a_conversation_has_the_form_that_mistral_common_gives_it(opened: Opened) -> None:
    voxtral = opened("voxtral")
    parts = [{"type": "audio"}, {"type": "text", "text": "what is it?"}]
    messages = [
        {"role": role, "content": content} for role, content in (("user", parts), ("assistant", "a"), ("user", "b"))
    ]
    rendered = voxtral.preparer.render(messages)
    assert rendered == "<s>[INST][BEGIN_AUDIO][AUDIO]what is it?[/INST]a</s>[INST]b[/INST]"
    tokens = voxtral.prepare(rendered, [sound(9000)]).token_ids
    assert tokens.count(voxtral.tokenizer.bos_token_id) == 1
    with pytest.raises(InvalidRequest, match="roles are user and assistant"):
        voxtral.preparer.render([{"role": "system", "content": "be brief"}])


def test_a_tokenizer_of_tekken_json_needs_no_mistral_common(tmp_path: Path) -> None:
    """Voxtral's folder has no other file about its tokens. mistral_common gives the same numbers."""
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>", "[AUDIO]", "[BEGIN_AUDIO]", "[TRANSCRIBE]"]
    pieces = [*(bytes([byte]) for byte in range(256)), b"th", b"the", b" the"]
    sizes = {"default_vocab_size": len(special) + len(pieces), "default_num_special_tokens": len(special)}
    written = {
        "config": {"pattern": r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+", "version": "v7", **sizes},
        "vocab": [{"rank": rank, "token_bytes": base64.b64encode(one).decode()} for rank, one in enumerate(pieces)],
        "special_tokens": [{"rank": rank, "token_str": text} for rank, text in enumerate(special)],
    }
    (tmp_path / "tekken.json").write_text(json.dumps(written))
    transformers.VoxtralConfig().save_pretrained(tmp_path)
    tokenizer = read_tokenizer(tmp_path)
    ids = tokenizer("[INST][BEGIN_AUDIO][AUDIO][/INST]lang:en[TRANSCRIBE]")["input_ids"]
    assert ids == [1, 3, 7, 6, 4, *(len(special) + byte for byte in b"lang:en"), 8]
    assert tokenizer("a the")["input_ids"] == [1, len(special) + ord("a"), len(special) + 258]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "lang:en"
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 5)


def test_settings_that_the_features_do_not_have_are_refused(tmp_path: Path) -> None:
    folder = make_checkpoint("fun_asr_nano", tmp_path)
    rewrite(folder / "preprocessor_config.json", window="povey")
    with pytest.raises(UnsupportedModel, match="window='povey'; allowed: 'hamming'"):
        Checkpoint.open("fun_asr_nano", folder)
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no preprocessor_config\.json"):
        Checkpoint.open("fun_asr_nano", folder)


# -- adapters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rslora", "scale"), [(False, 0.5), (True, 1.0)])
def test_a_merged_adapter_computes_what_the_adapter_beside_the_weights_does(
    rslora: bool, scale: float, granite: Path
) -> None:
    rewrite(granite / "adapter_config.json", use_rslora=rslora)
    merged = Checkpoint.open("granite_speech", granite)
    model: Any = transformers.GraniteSpeechForConditionalGeneration.from_pretrained(granite).eval()
    apart = beside(model, granite, scale)
    inputs = merged.process("say <|audio|> now", [sound(9000)])
    with torch.no_grad():
        expected, found = (model(inputs_embeds=inputs["inputs_embeds"]).logits for model in (apart, merged.module))
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    assert merged.module.state_dict().keys() == apart.state_dict().keys()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3'"),
        ({"bias": "all"}, "bias='all'"),
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ],
)
def test_an_adapter_of_another_kind_is_refused(changes: dict[str, Any], told: str, granite: Path) -> None:
    rewrite(granite / "adapter_config.json", **changes)
    with pytest.raises(UnsupportedModel, match=f"{told}.*allowed: LoRA without bias"):
        Checkpoint.open("granite_speech", granite)


def test_an_adapter_that_is_missing_or_does_not_fit_is_told(granite: Path) -> None:
    path = granite / "adapter_model.safetensors"
    save_file({name.replace("1.self_attn.q", "1.self_attn.z"): one for name, one in load_file(path).items()}, path)
    with pytest.raises(CheckpointError, match=r"z_proj of .* does not fit the model"):
        Checkpoint.open("granite_speech", granite)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"lacks its adapter .* hears badly; download them too"):
        Checkpoint.open("granite_speech", granite)


def test_an_adapter_beside_pickles_is_refused(granite: Path) -> None:
    """torch maps them, and transformers with peft would add the adapter itself."""
    torch.save(load_file(granite / "model.safetensors"), granite / "pytorch_model.bin")
    (granite / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="which has an adapter, are pickles; save them as safetensors"):
        Checkpoint.open("granite_speech", granite)


@pytest.mark.parametrize("prompt", ["hello", (20, 21)])
def test_a_prompt_without_audio_is_refused_where_an_adapter_is_merged(prompt: Any, opened: Opened) -> None:
    """transformers computes it without the adapter."""
    for name in ("granite_speech", "phi4_multimodal"):
        with pytest.raises(InvalidRequest, match=r"no audio, but the checkpoint's adapter.*give audio="):
            opened(name).prepare(prompt, [])
    assert not opened("granite_speech_plus").prepare(prompt, []).items


def test_phi_4_without_its_adapter_for_speech_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint("phi4_multimodal", tmp_path)
    (folder / "speech-lora" / "adapter_config.json").unlink()
    with pytest.raises(CheckpointError, match="speech-lora lacks its adapter"):
        Checkpoint.open("phi4_multimodal", folder)


def test_images_need_an_adapter_that_phi_4_is_not_given(opened: Opened) -> None:
    with pytest.raises(InvalidRequest, match="1 images, but the model reads text and audio"):
        opened("phi4_multimodal").preparer.prepare("<|audio|>", audio=[sound(9000)], images=[picture(28, 28)])
    with pytest.raises(InvalidRequest, match=r"<\|image\|>"):
        opened("phi4_multimodal").prepare("<|audio|><|image|>", [sound(9000)])


def test_phi_4_in_its_own_code_is_refused_with_the_branch_to_take(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"'phi4mm'.*--revision refs/pr/70' prints"):
        read_text_checkpoint(FileSettings(tmp_path / "config.json", {"model_type": "phi4mm"}))


# -- transcriptions --------------------------------------------------------------------------------------------------


@pytest.fixture
def described(checkpoint: Checkpoint) -> ModelDescription:
    return read_blueprint(checkpoint.folder, EngineConfig(device="cpu", dtype="float32")).sized(0).describe("m")


def test_a_request_for_a_transcription_is_the_models_own(checkpoint: Checkpoint, described: ModelDescription) -> None:
    model, samples = pickle.loads(pickle.dumps(described.speech)), sound(9000)
    for asked, prompt in REQUESTS[checkpoint.name]:
        heard = model.hear(samples)
        draft = model.draft(heard, Ask(**({"language": None} | asked)))
        assert list(draft.token_ids) == checkpoint.process(prompt, [samples])["input_ids"][0].tolist()
        assert [item.key for item in draft.items] == [heard.item.key]


def test_a_transcription_takes_what_the_model_documents(checkpoint: Checkpoint, described: ModelDescription) -> None:
    facts, languages = described.speech.facts, {"voxtral": 9, "fun_asr_nano": 3}
    assert len(facts.languages) == languages.get(checkpoint.name, 0)
    translates = checkpoint.name in ("granite_speech", "phi4_multimodal")
    assert facts.tasks == ("transcribe", *(["translate"] if translates else []))
    assert ("hotwords" in facts.options) is (checkpoint.name not in ("voxtral", "phi4_multimodal"))
    assert ("initial_prompt" in facts.options) is (checkpoint.name == "fun_asr_nano")
    assert (facts.window_samples == 64_719) is (checkpoint.name == "fun_asr_nano")
    longest = described.speech.hear(sound(facts.window_samples))
    assert longest.item.embeddings <= described.max_positions * 0.7


def test_a_tokenizer_without_the_tokens_of_requests_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint("voxtral", tmp_path)
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace("[TRANSCRIBE]", "[OTHER]"))
    with pytest.raises(CheckpointError, match=r"the tokenizer has no \[TRANSCRIBE\]"):
        Checkpoint.open("voxtral", folder)
