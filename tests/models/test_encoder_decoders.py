"""Encoder-decoders besides Whisper: what is refused when they open, and what a batch may not change."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from attrs import evolve
from safetensors.torch import load_file, save_file

from triolet.core.errors import CheckpointError, InvalidRequest, RequestTooLarge, UnsupportedModel
from triolet.core.request import LogitRules, SamplingParams
from triolet.models.architectures import crossed_family
from triolet.models.executor import TorchExecutor
from triolet.models.native import crossed_decoder
from triolet.models.native.library import Library
from triolet.models.sampling.logits import change
from triolet.models.sampling.rules import ConstantBans, SamplerInput, draw_of, repeats

from .texts import SMALL

WIDTHS = {
    "moonshine": 48,
    "moonshine_streaming": 32,
    "cohere_asr": 32,
    "canary": 48,
    "bart": 48,
    "t5": 48,
}  # of an encoder output
HEARING = ("moonshine", "moonshine_streaming", "cohere_asr", "canary")


def jobs_of(description, name):
    """Items of several lengths, two of them equal in length."""
    if name in HEARING:
        sounds = [
            np.random.default_rng(n).standard_normal(size).astype(np.float32)
            for n, size in enumerate((5000, 900, 5000, 20_000))
        ]
        prepared = [description.preparer.prepare((), audio=[sound]) for sound in sounds]
    else:
        prepared = [
            description.preparer.prepare(text) for text in ("a cat", "the dog in the hat", "a dog", "that " * 20)
        ]
    return [one.items[0] for one in prepared]


# -- encoders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WIDTHS)
def test_an_item_is_encoded_beside_others_as_alone(opens, folder, name):
    executor, description = opens(folder(name))
    jobs = jobs_of(description, name)
    executor.encode(tuple(jobs))
    together = [executor._open.outputs.get(job.key).clone() for job in jobs]
    executor.free(tuple(job.key for job in jobs))
    for job, beside in zip(jobs, together, strict=True):
        executor.encode((job,))
        alone = executor._open.outputs.get(job.key)
        assert alone.shape == (job.embeddings, WIDTHS[name])
        torch.testing.assert_close(alone, beside, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", HEARING)
def test_audio_has_as_many_embeddings_as_the_convolutions_make(opens, folder, name):
    executor, description = opens(folder(name))
    for samples in (895, 896, 1_087, 1_279, 1_280, 1_440, 5_000, 16_000, 480_000):
        longest = min(samples, description.window_samples)
        item = description.preparer.prepare((), audio=[np.zeros(longest, np.float32)]).items[0]
        assert item.size == item.embeddings * WIDTHS[name] * 4
        executor.encode((item,))
        assert len(executor._open.outputs.get(item.key)) == item.embeddings <= description.encoder_embeddings
        executor.free((item.key,))


@pytest.mark.parametrize("samples", [80, 81, 399, 5_001, 20_079])
def test_moonshine_streaming_encodes_as_transformers_does(opens, folder, samples):
    """Also a last frame that is not whole, which is masked there."""
    executor, description = opens(folder("moonshine_streaming"))
    audio = np.random.default_rng(1).standard_normal(samples).astype(np.float32)
    item = description.preparer.prepare((), audio=[audio]).items[0]
    executor.encode((item,))
    extractor = transformers.AutoFeatureExtractor.from_pretrained(folder("moonshine_streaming"))
    module = transformers.MoonshineStreamingForConditionalGeneration.from_pretrained(folder("moonshine_streaming"))
    inputs = extractor(audio, sampling_rate=16_000, return_tensors="pt", padding=True, pad_to_multiple_of=80)
    with torch.inference_mode():
        expected = module.eval().get_encoder()(**inputs).last_hidden_state[0]
    torch.testing.assert_close(executor._open.outputs.get(item.key), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("steps", [(16_000, 20_079, 30_002), (40_000, 40_001), (81, 399, 81_920)])
def test_moonshine_streaming_goes_on_from_an_output_that_is_resident(opens, folder, steps, monkeypatch):
    """With the output of the beginning or without, the output of the whole is the same; with it, less is computed."""
    executor, description = opens(folder("moonshine_streaming"))
    audio = np.random.default_rng(2).standard_normal(max(steps)).astype(np.float32)
    embedder = executor._open.parts.model.module.get_encoder().embedder
    heard = []
    embedder.linear.register_forward_pre_hook(lambda module, args: heard.append(args[0].shape[-2]))
    known = ""
    for size in steps:
        item = description.preparer.prepare((), audio=[audio[:size]]).items[0]
        executor.encode((evolve(item, follows=known), evolve(item, key="anew")))
        found, anew = map(executor._open.outputs.get, (item.key, "anew"))
        torch.testing.assert_close(found, anew, rtol=1e-4, atol=1e-4)
        executor.free(("anew", *([known] if known else [])))
        known = item.key
    executor.free((known,))
    assert heard[-2] <= heard[-1]


@pytest.mark.parametrize("clip", [{"max_audio_clip_s": 12.0}, {"overlap_chunk_second": 25.0}])
def test_audio_that_the_feature_extractor_would_cut_is_refused(changed, opens, clip):
    """Of one piece, it would make several."""
    _, description = opens(
        changed("cohere_asr", "processor_config.json", feature_extractor=lambda old: {**old, **clip})
    )
    longest = int((clip.get("max_audio_clip_s", 35.0) - clip.get("overlap_chunk_second", 5.0)) * 16_000)
    assert len(description.preparer.prepare((), audio=[np.zeros(longest, np.float32)]).items) == 1
    with pytest.raises(RequestTooLarge, match=f"allowed: up to {longest // 16_000} s"):
        description.preparer.prepare((), audio=[np.zeros(longest + 1, np.float32)])


@pytest.mark.parametrize("normalizes", [False, True])
@pytest.mark.parametrize("name", ["moonshine", "moonshine_streaming"])
def test_samples_are_read_as_the_feature_extractor_reads_them(changed, opens, name, normalizes):
    """Moonshine streaming reads frames of 80 samples, and masks one that is not whole."""
    path = changed(name, "preprocessor_config.json", do_normalize=normalizes)
    _, description = opens(path)
    samples = np.random.default_rng(1).standard_normal(3_010).astype(np.float32)
    item = description.preparer.prepare((), audio=[samples]).items[0]
    extractor = transformers.AutoFeatureExtractor.from_pretrained(path)
    filled = {"padding": True, "pad_to_multiple_of": 80} if "streaming" in name else {}
    expected = extractor(samples, sampling_rate=16_000, return_tensors="pt", **filled)["input_values"][0]
    if filled:
        expected[-80:] = 0.0
    assert torch.equal(item.payload["input_values"], expected)


# -- what is opened ---------------------------------------------------------------------------------------------------


def save_kin(path, like, model_type):
    """Saves a random model of ``model_type`` with the sizes, tokens and rules of the checkpoint ``like``."""
    settings = json.loads((like / "config.json").read_text())
    for name in ("model_type", "architectures", "transformers_version"):
        settings.pop(name)
    made = transformers.AutoConfig.for_model(model_type, **settings)
    torch.manual_seed(0)
    loader = crossed_family.find_crossed_family(model_type).loader
    model = getattr(transformers, loader)(made)
    model.generation_config = transformers.GenerationConfig.from_pretrained(like)
    transformers.AutoTokenizer.from_pretrained(like).save_pretrained(path)
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize("model_type", ["mbart", "pegasus", "mt5"])
def test_kin_of_bart_and_t5_open_and_pass_the_comparison(opens, folder, tmp_path, model_type):
    """Norms elsewhere, positions by sines, gated layers: transformers' modules compute them."""
    path = save_kin(tmp_path, folder("t5" if model_type == "mt5" else "bart"), model_type)
    _, description = opens(path)
    assert description.architecture == crossed_family.find_crossed_family(model_type).loader


def test_the_page_on_adding_a_model_adds_one(opens, folder, tmp_path, monkeypatch):
    page = (Path(__file__).resolve().parents[2] / "docs" / "adding-a-model.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    names = {}
    exec(compile(code, "adding-a-model.md", "exec"), names)
    known = crossed_family._families()
    assert names["model_type"] not in known, "the page should add a model that is not there"
    monkeypatch.setattr(crossed_family, "_families", lambda: {**known, names["model_type"]: names["family"]})
    path = save_kin(tmp_path, folder("bart"), names["model_type"])
    _, description = opens(path)
    assert description.architecture == names["family"].loader


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"bad_words_ids": [[5, 6]]}, "bad_words_ids"),
        ({"encoder_no_repeat_ngram_size": 3}, "encoder_no_repeat_ngram_size=3"),
        ({"encoder_repetition_penalty": 1.5}, "encoder_repetition_penalty=1.5"),
        ({"guidance_scale": 2.0}, "guidance_scale=2.0"),
        ({"forced_bos_token_id": [1, 2]}, "forced_bos_token_id"),
    ],
)
def test_what_generate_would_do_and_we_do_not_is_refused_by_name(changed, settings, named):
    with pytest.raises(UnsupportedModel, match=named):
        TorchExecutor(changed("bart", "generation_config.json", **settings), SMALL).open()


def test_what_a_request_says_is_told_when_the_checkpoint_says_it_too(changed, opens, caplog):
    opens(changed("bart", "generation_config.json", num_beams=4, repetition_penalty=1.2))
    assert "num_beams=4, repetition_penalty=1.2, which is not used: SamplingParams" in caplog.text


def test_a_bad_word_of_one_token_is_suppressed(changed, opens):
    _, description = opens(changed("bart", "generation_config.json", bad_words_ids=[[7], [265]]))
    assert description.suppress_token_ids == (7,), "265 is the end, which may come"


def test_a_special_token_outside_of_the_vocabulary_is_refused(changed):
    with pytest.raises(CheckpointError, match=r"eos_token_id=99999; allowed: .* from 0 to 265"):
        TorchExecutor(changed("bart", "generation_config.json", eos_token_id=99_999), SMALL).open()


def test_another_feature_extractor_is_refused(changed):
    other = {"feature_extractor_type": "WhisperFeatureExtractor"}
    path = changed("cohere_asr", "processor_config.json", feature_extractor=lambda old: {**old, **other})
    with pytest.raises(UnsupportedModel, match="is a WhisperFeatureExtractor; allowed: CohereAsrFeatureExtractor or"):
        TorchExecutor(path, SMALL).open()


@pytest.mark.parametrize("name", ["cohere_asr", "canary"])
def test_a_tokenizer_without_languages_is_refused(changed, folder, name):
    path = changed(name, "config.json")
    shutil.copy(folder("moonshine") / "tokenizer.json", path)
    with pytest.raises(CheckpointError, match="has no token of a language, such as"):
        TorchExecutor(path, SMALL).open()


def test_a_canary_that_cannot_write_its_prompt_is_refused(changed):
    path = changed("canary", "config.json")
    (path / "chat_template.jinja").unlink()
    with pytest.raises(CheckpointError, match="has no chat template, which writes the prompt"):
        TorchExecutor(path, SMALL).open()


def test_a_checkpoint_without_a_start_token_is_refused(changed):
    path = changed("t5", "generation_config.json", decoder_start_token_id=None, bos_token_id=None)
    with pytest.raises(UnsupportedModel, match="neither decoder_start_token_id nor bos_token_id"):
        TorchExecutor(path, SMALL).open()


def test_another_encoder_decoder_is_refused_with_those_that_are_known(changed):
    path = changed("bart", "config.json", model_type="blenderbot", architectures=["BlenderbotForConditionalGeneration"])
    with pytest.raises(
        UnsupportedModel,
        match=r"not supported \(supported: whisper, moonshine, moonshine_streaming, cohere_asr, canary, bart",
    ):
        TorchExecutor(path, SMALL).open()


@pytest.mark.parametrize(
    ("name", "method", "broken"),
    [
        ("t5", "distances", lambda self, module, positions: torch.zeros(positions, 4)),
        ("bart", "instead", lambda self, module, positions, distances: []),
        ("moonshine", "instead", lambda self, module, positions, distances: []),
        ("cohere_asr", "instead", lambda self, module, positions, distances: []),
        ("moonshine_streaming", "projected", lambda self, module, output: module.get_decoder().proj(output)),
        ("cohere_asr", "projected", lambda self, module, output: output.repeat(1, 2)[:, :48]),
    ],
)
def test_the_comparison_refuses_a_family_that_misleads_the_decoder(folder, monkeypatch, name, method, broken):
    """Without the bias by distance, with positions that the module counts over all rows of a step, or with an encoder
    output that the decoder projects."""
    monkeypatch.setattr(type(crossed_family.find_crossed_family(name)), method, broken)
    with pytest.raises(UnsupportedModel, match="computes other numbers"):
        TorchExecutor(folder(name), SMALL).open()


def test_weights_that_are_no_numbers_are_named(folder, tmp_path):
    """Not told as a difference between two computations."""
    copied = shutil.copytree(folder("bart"), tmp_path / "bart")
    weights = load_file(copied / "model.safetensors")
    name = next(name for name in weights if name.endswith("decoder.layers.0.fc1.weight"))
    weights[name][0, 0] = torch.nan
    save_file(weights, copied / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"has NaN or infinite values in .*layers\.0\.fc1\.weight; copy"):
        TorchExecutor(copied, SMALL).open()


@pytest.mark.skipif(Library.load() is None, reason="installed without a compiler")
def test_the_comparison_refuses_what_the_native_library_computes_otherwise(folder, monkeypatch):
    def embed(program, base, hidden, positions):
        program.look_up(hidden, base.embed_tokens.panels(), 1.0)

    monkeypatch.setattr(crossed_decoder, "embed", embed)
    with pytest.raises(UnsupportedModel, match="computes other numbers by the native library than by transformers"):
        TorchExecutor(folder("bart"), SMALL).open()


def test_cross_attention_by_another_name_is_refused(folder, monkeypatch):
    misnamed = crossed_family.Bart("BartForConditionalGeneration", crossing="cross_attn")
    monkeypatch.setattr(crossed_family, "_families", lambda: {"bart": misnamed})
    with pytest.raises(UnsupportedModel, match=r"cross-attention in layers \[\]"):
        TorchExecutor(folder("bart"), SMALL).open()


# -- items -------------------------------------------------------------------------------------------------------------


def test_equal_items_have_one_key_and_others_do_not(opens, folder):
    _, text = opens(folder("t5"))
    _, sound = opens(folder("moonshine"))
    first, second = (np.full(2_000, value, np.float32) for value in (0.1, 0.2))
    keys = [text.preparer.prepare(prompt).items[0].key for prompt in ("a cat", "a cat", "a hat")]
    keys += [sound.preparer.prepare((), audio=[samples]).items[0].key for samples in (first, first.copy(), second)]
    assert keys[0] == keys[1]
    assert keys[3] == keys[4]
    assert len(set(keys)) == 4


def test_items_of_no_possible_length_are_refused(opens, folder):
    _, text = opens(folder("bart"))
    _, sound = opens(folder("moonshine"))
    with pytest.raises(RequestTooLarge, match="up to 256"):
        text.preparer.prepare("cat " * 300)
    with pytest.raises(InvalidRequest, match="without tokens"):
        text.preparer.prepare(())
    with pytest.raises(InvalidRequest, match=r"894 samples.* 895 samples or more"):
        sound.preparer.prepare((), audio=[np.zeros(894, np.float32)])
    with pytest.raises(RequestTooLarge, match=r"30\.00 s is too long; allowed: up to 30 s"):
        sound.preparer.prepare((), audio=[np.zeros(480_001, np.float32)])
    with pytest.raises(InvalidRequest, match="0 images and 2 pieces of audio"):
        sound.preparer.prepare((), audio=[np.zeros(1_000, np.float32)] * 2)
    with pytest.raises(InvalidRequest, match="1 messages"):
        sound.preparer.render([{"role": "user", "content": "hello"}])


def test_the_decoder_begins_as_in_generate(opens, folder):
    """The start token is put before tokens that do not begin with it."""
    _, sound = opens(folder("moonshine"))
    samples = np.zeros(1_000, np.float32)
    start = sound.preparer.prepare((), audio=[samples]).token_ids
    assert len(start) == 1
    assert sound.preparer.prepare((5, 6), audio=[samples]).token_ids == (*start, 5, 6)
    assert sound.preparer.prepare((*start, 5), audio=[samples]).token_ids == (*start, 5)
    assert sound.preparer.prepare("ab", audio=[samples]).token_ids[0] == start[0]


# -- generation rules --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_tokens_that_would_repeat_are_those_of_transformers(size):
    processor = transformers.NoRepeatNGramLogitsProcessor(size)
    numbers = torch.Generator().manual_seed(size)
    for length in range(12):
        tokens = torch.randint(0, 4, (1, length), generator=numbers)
        scores = processor(tokens, torch.zeros(1, 4))
        assert repeats(tokens[0].tolist(), size) == set(torch.where(scores[0].isinf())[0].tolist())


def test_a_forced_token_comes_whatever_forbids_it():
    rules = LogitRules(forced=((0, 2),), min_tokens=5, begin_suppress=(1,))
    sampling = SamplingParams()
    logits = torch.zeros(3, 5)
    inputs = [SamplerInput(generated=tokens, sampling=sampling, rules=rules) for tokens in ([], [2], [2, 3])]
    change(logits, [draw_of(one, ConstantBans(5), (2,)) for one in inputs])
    assert logits[0].isfinite().tolist() == [False, False, True, False, False]
    assert logits[1].isfinite().tolist() == [True, False, False, True, True], "what may not begin stands behind it"
    assert logits[2].isfinite().tolist() == [True, True, False, True, True]


def test_more_heads_than_numbers_are_refused(changed):
    with pytest.raises(UnsupportedModel, match=r"has decoder_num_attention_heads=100; allowed: up to 48, its width"):
        TorchExecutor(changed("moonshine", "config.json", decoder_num_attention_heads=100), SMALL).open()
