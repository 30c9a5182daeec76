"""Prompts: their tokens and items are those of the checkpoint's own processor, and what cannot be read is told."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer

from triolet.core.errors import CheckpointError, InvalidRequest, UnsupportedModel
from triolet.core.model import Prepared
from triolet.models.architectures.conversations import Rendered
from triolet.models.architectures.prompts import TextPreparer, payload_key

from ..checkpoints.checkpoints import rewrite
from ..checkpoints.families import make_checkpoint
from .media import HEARING, HIDDEN, PLACEHOLDERS, SPEECH, Checkpoint, make_preparer, make_processor, picture, sound
from .towers import TOWERS

Opened = Callable[[str], Checkpoint]


@pytest.fixture(params=[name for name in PLACEHOLDERS if name not in TOWERS])
def checkpoint(request: pytest.FixtureRequest, opened: Opened) -> Checkpoint:
    return opened(request.param)


@pytest.fixture
def qwen(opened: Opened) -> Checkpoint:
    return opened("qwen2_5_vl")


@pytest.fixture
def hearing(opened: Opened) -> Checkpoint:
    return opened("qwen2_audio")


def check_equal_to_the_processor(prepared: Prepared, inputs: dict[str, Any]) -> None:
    assert prepared.token_ids == tuple(inputs["input_ids"][0].tolist())
    payloads = [item.payload for item in prepared.items]
    if inputs.keys() & {"input_features_mask", "input_values"}:
        for name in inputs.keys() & payloads[0].keys():
            parts = inputs[name].split([len(payload[name]) for payload in payloads])
            lengths = [payload[name].shape[-1] for payload in payloads]
            cut = [part[..., :length] for part, length in zip(parts, lengths, strict=True)]
            assert all(map(torch.equal, cut, [payload[name] for payload in payloads]))
        return
    if "input_features" in inputs:
        assert torch.equal(torch.stack([payload["input_features"] for payload in payloads]), inputs["input_features"])
        frames = inputs["feature_attention_mask"].sum(-1)
        assert torch.equal(torch.stack([payload["frames"] for payload in payloads]), frames)
        return
    pixels = [one[0] if one.dim() == 5 else one for one in (payload["pixel_values"] for payload in payloads)]
    if "image_position_ids" in inputs:  # Gemma 4's, which may be filled up
        for name in payloads[0]:
            for payload, whole in zip(payloads, inputs[name], strict=True):
                assert torch.equal(payload[name][0], whole[: payload[name].shape[1]])
        return
    if "spatial_shapes" in inputs:  # LFM2-VL's
        for name in payloads[0]:
            assert torch.equal(torch.cat([payload[name] for payload in payloads]), inputs[name])
        return
    if "image_sizes" in inputs:  # Pixtral's are filled up to the largest, LLaVA-NeXT's to the most
        sizes = [payload["image_sizes"][0].tolist() for payload in payloads]
        assert sizes == torch.as_tensor(inputs["image_sizes"]).tolist()
        if inputs["pixel_values"].dim() == 5:
            assert all(
                torch.equal(one[: len(own)], own) for one, own in zip(inputs["pixel_values"], pixels, strict=True)
            )
            return
        cut = [one[None, :, :high, :wide] for one, (high, wide) in zip(inputs["pixel_values"], sizes, strict=True)]
        assert all(map(torch.equal, cut, pixels))
        return
    joined = torch.stack(pixels) if pixels[0].dim() == 3 else torch.cat(pixels)  # LLaVA's have one size
    wanted = inputs["pixel_values"]
    assert torch.equal(joined, wanted[0] if wanted.dim() == 5 else wanted)
    if "image_grid_thw" in inputs:
        assert [list(item.grid) for item in prepared.items] == inputs["image_grid_thw"].tolist()
        assert torch.equal(torch.stack([payload["image_grid_thw"] for payload in payloads]), inputs["image_grid_thw"])
    if "pixel_attention_mask" in inputs:
        masks = torch.cat([payload["pixel_attention_mask"].flatten() for payload in payloads])
        assert torch.equal(masks.long(), inputs["pixel_attention_mask"][0].flatten().long())


# -- text and items, as the processor makes them ---------------------------------------------------------------------


@pytest.mark.parametrize("frame", ["{0}", "{0}{0}", "\n{0}\n", "a {0} b {0} c {0}\n"])
def test_tokens_and_items_are_those_of_the_processor_wherever_items_stand(frame: str, checkpoint: Checkpoint) -> None:
    prompt = frame.format(checkpoint.placeholder)
    items = checkpoint.items(*range(frame.count("{0}")))
    check_equal_to_the_processor(checkpoint.prepare(prompt, items), checkpoint.process(prompt, items))


def test_spans_hold_the_placeholders_of_their_item_and_nothing_else(checkpoint: Checkpoint) -> None:
    mark = checkpoint.placeholder
    prepared = checkpoint.prepare(f"{mark} and {mark}{mark}", checkpoint.items(0, 1, 2))
    places = [place for item in prepared.items for span in item.spans for place in range(*span)]
    wanted = [at for at, token in enumerate(prepared.token_ids) if token == checkpoint.preparer.embedded_id]
    assert places == wanted
    for item in prepared.items:
        assert sum(stop - start for start, stop in item.spans) == item.embeddings
        assert item.size == item.embeddings * (1 + checkpoint.family.deeper(checkpoint.config)) * HIDDEN * 4


def test_an_image_that_is_not_cut_has_one_span(opened: Opened, tmp_path: Path) -> None:
    folder = make_checkpoint("smolvlm", tmp_path)
    rewrite(folder / "preprocessor_config.json", do_image_splitting=False)
    checkpoint = Checkpoint.open("smolvlm", folder)
    prompt, items = "see <image> there", [picture(64, 64)]
    prepared = checkpoint.prepare(prompt, items)
    check_equal_to_the_processor(prepared, checkpoint.process(prompt, items))
    assert len(prepared.items[0].spans) == 1


def test_a_placeholder_among_tokens_is_expanded_likewise(checkpoint: Checkpoint) -> None:
    mark = checkpoint.placeholder
    prompt, items = f"What is {mark} and what is {mark} then?", checkpoint.items(0, 1)
    tokens = checkpoint.tokenizer(prompt)["input_ids"]
    assert tokens.count(checkpoint.preparer.placeholder_id) == 2
    of_text, of_tokens = checkpoint.prepare(prompt, items), checkpoint.prepare(tokens, items)
    assert of_tokens.token_ids == of_text.token_ids
    assert [item.placeholder for item in of_tokens.items] == [item.placeholder for item in of_text.items]


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK", "I;16", "1"])
def test_an_image_of_any_mode_is_read_as_the_processor_reads_it(mode: str, qwen: Checkpoint) -> None:
    image = picture(40, 60).convert("RGBA")
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    image = Image.new("I;16", (60, 40), 300) if mode == "I;16" else image.convert(mode)
    prompt = f"see {qwen.placeholder}"
    check_equal_to_the_processor(qwen.prepare(prompt, [image]), qwen.process(prompt, [image]))


# -- conversations ---------------------------------------------------------------------------------------------------


def test_a_rendered_conversation_has_the_tokens_of_the_processors_own(checkpoint: Checkpoint) -> None:
    medium, given = next(iter(checkpoint.preparer.media)), checkpoint.items(0, 1)
    parts: list[Any] = [{"type": medium, medium: item} for item in given]
    parts.insert(1, {"type": "text", "text": "and "})
    messages = [{"role": "user", "content": parts}, {"role": "user", "content": [{"type": "text", "text": "ok"}]}]
    processor = make_processor(checkpoint.name, checkpoint.folder)
    if checkpoint.name == "smolvlm":  # which asks it, video or not
        processor.video_processor = SimpleNamespace(num_frames=1, fps=1)
    if checkpoint.name == "got_ocr2":  # it writes a conversation without a template, for one image
        given, messages = given[:1], [{"role": "user", "content": [parts[0], {"type": "text", "text": " OCR: "}]}]
        expected = dict(processor(images=given, num_image_tokens=4, return_tensors="pt"))
        check_equal_to_the_processor(checkpoint.prepare(checkpoint.preparer.render(messages), given), expected)
        return
    options = {"tokenize": True, "return_dict": True, "return_tensors": "pt", "add_generation_prompt": True}
    expected = dict(processor.apply_chat_template(messages, **options))
    rendered = checkpoint.preparer.render(messages)
    if checkpoint.name in SPEECH:  # features of each alone
        expected = {**checkpoint.process(rendered, given), "input_ids": expected["input_ids"]}
    prepared = checkpoint.prepare(rendered, given)
    check_equal_to_the_processor(prepared, expected)


def test_a_prompt_that_a_user_began_with_a_special_token_gets_the_tokenizers_own_too(opened: Opened) -> None:
    """As in the processor; only a rendered conversation is known to have it."""
    checkpoint = opened("llava")
    prompt, items = "<s>see <image>", checkpoint.items(0)
    prepared = checkpoint.prepare(prompt, items)
    check_equal_to_the_processor(prepared, checkpoint.process(prompt, items))
    assert prepared.token_ids[:2] == (checkpoint.tokenizer.bos_token_id,) * 2
    assert checkpoint.prepare(Rendered(prompt), items).token_ids == prepared.token_ids[1:]


def test_an_older_checkpoints_template_is_found_in_its_own_file(tmp_path: Path) -> None:
    folder = make_checkpoint("llava", tmp_path)
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "USER: {{ messages[0]['content'] }}"}))
    preparer = Checkpoint.open("llava", folder).preparer
    assert preparer.render([{"role": "user", "content": "hi"}]) == "USER: hi"


def test_an_audio_checkpoint_without_a_template_has_transformers_own(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen2_audio", tmp_path)
    (folder / "chat_template.jinja").unlink()
    preparer = Checkpoint.open("qwen2_audio", folder).preparer
    rendered = preparer.render([{"role": "user", "content": [{"type": "audio"}]}])
    assert "Audio 1: <|audio_bos|><|AUDIO|><|audio_eos|>\n<|im_end|>" in rendered


# -- keys ------------------------------------------------------------------------------------------------------------


def test_equal_content_has_one_key_and_other_content_another(checkpoint: Checkpoint) -> None:
    mark = checkpoint.placeholder
    one, other = checkpoint.items(0, 3)  # of one size, where they are images
    first, second = (checkpoint.prepare(f"{text} {mark}{mark}", [one, other]) for text in ("a", "b"))
    assert [item.key for item in first.items] == [item.key for item in second.items]
    assert first.items[0].key != first.items[1].key


def test_other_weights_dtypes_and_settings_give_another_key(checkpoint: Checkpoint, tmp_path: Path) -> None:
    def key(folder: Path = checkpoint.folder, **changes: Any) -> str:
        preparer = make_preparer(folder, checkpoint.family, checkpoint.config, checkpoint.tokenizer, **changes)
        given = {"audio" if checkpoint.name in HEARING else "images": checkpoint.items(0)}
        return preparer.prepare(checkpoint.placeholder, **given).items[0].key

    folder = make_checkpoint(checkpoint.name, tmp_path)
    assert key() == key(folder)
    changed = (
        {"padding_value": 0.5} if checkpoint.name in HEARING else {"image_std": [0.4, 0.4, 0.4], "rescale_factor": 0.5}
    )
    if checkpoint.name in SPEECH:
        rewrite(folder / "processor_config.json", feature_extractor=lambda old: {**old, **changed})
    else:
        rewrite(folder / "preprocessor_config.json", **changed)
    keys = {key(), key(identity="others"), key(dtype=torch.bfloat16), key(folder)}
    assert len(keys) == 4


def test_grids_are_part_of_the_key(qwen: Checkpoint) -> None:
    """Two images of one colour, as wide as the other is high, have equal patches."""
    images = [Image.new("RGB", size, "red") for size in ((64, 32), (32, 64))]
    wide, high = qwen.prepare(qwen.placeholder * 2, images).items
    assert torch.equal(wide.payload["pixel_values"], high.payload["pixel_values"])
    assert wide.key != high.key


def test_what_a_tensor_is_called_and_its_kind_and_shape_are_part_of_the_key() -> None:
    zeros = torch.zeros(4, 6)
    payloads = [{"a": zeros}, {"b": zeros}, {"a": zeros.reshape(6, 4)}, {"a": zeros.int()}, {"a": zeros, "b": zeros}]
    assert len({payload_key("weights", payload) for payload in payloads}) == 5
    assert payload_key("weights", {"a": zeros}) == payload_key("weights", {"a": torch.zeros(6, 4).T})


# -- what cannot be read ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llava", "qwen2_audio"])
@pytest.mark.parametrize(("marks", "items"), [(1, 0), (0, 1), (2, 1), (1, 2)])
def test_placeholders_and_items_that_do_not_match_are_told_by_both_counts(
    marks: int, items: int, name: str, opened: Opened
) -> None:
    checkpoint = opened(name)
    prompt = "see " + checkpoint.placeholder * marks
    given = checkpoint.items(*range(items))
    counted = rf"{items} (of audio|images?) (was|were) given"
    told = rf"the prompt has {marks} of '<.*>' \(token \d+\), but {counted}; write it once"
    with pytest.raises(InvalidRequest, match=told):
        checkpoint.prepare(prompt, given)
    with pytest.raises(InvalidRequest, match=told):
        checkpoint.prepare(checkpoint.tokenizer(prompt)["input_ids"], given)


def test_a_user_may_write_about_a_placeholder(checkpoint: Checkpoint) -> None:
    """It counted as an image, and was refused. Where items are given beside the messages, it is their place."""
    mark, preparer = checkpoint.placeholder, checkpoint.preparer
    asked = [{"role": "user", "content": [{"type": "text", "text": f"why {mark}?"}]}]
    prepared = checkpoint.prepare(preparer.render(asked), [])
    assert not prepared.items
    told = checkpoint.tokenizer.decode(prepared.token_ids)
    assert mark not in told
    assert checkpoint.prepare(preparer.render(asked, placed=True), checkpoint.items(0)).items


def test_items_without_a_placeholder_go_in_front_as_the_model_knows_them(checkpoint: Checkpoint) -> None:
    """With the tokens around them that a chat template writes; a prompt with placeholders stays as it is."""
    preparer, items = checkpoint.preparer, checkpoint.items(0, 1)
    prompt = preparer.with_items("what is it?", 2)
    line = "\n" if checkpoint.name in ("llava", "llava_next", "llava_onevision", "internvl", "got_ocr2") else ""
    assert prompt == (checkpoint.placeholder + line) * 2 + "what is it?"
    assert len(checkpoint.prepare(prompt, items).items) == 2
    assert preparer.with_items(prompt, 3) == prompt


def test_another_medium_than_the_models_is_refused(qwen: Checkpoint, hearing: Checkpoint) -> None:
    with pytest.raises(InvalidRequest, match="1 audio, but the model reads text and image; leave them out"):
        qwen.preparer.prepare("hear", audio=[sound(100)])
    with pytest.raises(InvalidRequest, match="1 images, but the model reads text and audio; leave them out"):
        hearing.preparer.prepare("see", images=[picture(9, 9)])


def test_an_image_without_pixels_is_refused_by_its_number(qwen: Checkpoint) -> None:
    with pytest.raises(InvalidRequest, match=r"image 2 of 2: an image has 0 x 5 pixels; allowed: 1 x 1 or more"):
        qwen.prepare(qwen.placeholder * 2, [picture(9, 9), Image.new("RGB", (0, 5))])


def test_a_damaged_file_is_told(qwen: Checkpoint) -> None:
    written = io.BytesIO()
    picture(50, 50).save(written, "PNG")
    damaged = Image.open(io.BytesIO(written.getvalue()[:500]))
    with pytest.raises(InvalidRequest, match=r"image 1 of 1: it cannot be decoded: OSError: .*truncated"):
        qwen.prepare(qwen.placeholder, [damaged])


def test_a_size_that_the_processor_refuses_is_told(qwen: Checkpoint) -> None:
    told = "image 1 of 1: the checkpoint's processor refuses an image of 500 x 2 pixels: .*aspect ratio"
    with pytest.raises(InvalidRequest, match=told):
        qwen.prepare(qwen.placeholder, [picture(2, 500)])


@pytest.mark.parametrize(
    ("item", "told"),
    [
        (np.zeros(0, np.float32), "0 samples; allowed: 1 to .*, float32 at"),
        (
            np.zeros(16_001, np.float32),
            "16001 samples; allowed: .* Cut longer audio into windows",
        ),
        (np.zeros(200, np.float32), "200 samples, too few for one embedding; allowed: 40 ms or more"),
    ],
)
def test_what_is_no_audio_is_told_by_its_number(item: Any, told: str, hearing: Checkpoint) -> None:
    with pytest.raises(InvalidRequest, match=rf"audio 2 of 2: the audio has {told}"):
        hearing.prepare(hearing.placeholder * 2, [sound(1000), item])


def test_forty_milliseconds_and_a_whole_window_are_heard(hearing: Checkpoint) -> None:
    short, whole = hearing.prepare(hearing.placeholder * 2, [sound(640), sound(16_000)]).items
    assert (short.embeddings, whole.embeddings) == (1, 25)
    assert hearing.preparer.sampling_rate == 16_000


@pytest.mark.parametrize("name", SPEECH)
def test_audio_of_a_speech_model_is_read_whole_or_refused(name: str, opened: Opened) -> None:
    """The processors of two of them would cut off what is longer, with a line in the log."""
    checkpoint = opened(name)
    whole = {"glmasr": 128_000, "audioflamingo3": 64_000}.get(name)
    most = "or more" if whole is None else f"to {whole}"
    with pytest.raises(InvalidRequest, match=f"audio 2 of 2: the audio has 0 samples; allowed: 1 {most}"):
        checkpoint.prepare(checkpoint.placeholder * 2, [sound(1000), sound(0)])
    (item,) = checkpoint.prepare(checkpoint.placeholder, [sound(whole or 600_000)]).items
    (encoded,) = checkpoint.family.encode(checkpoint.module, [item.payload])  # in calls of 16 windows
    assert len(encoded) == item.embeddings > 50
    if whole is not None:
        with pytest.raises(
            InvalidRequest, match=rf"allowed: 1 to {whole} \(.* seconds\), float32 .* Cut longer audio into windows"
        ):
            checkpoint.prepare(checkpoint.placeholder, [sound(whole + 1)])


@pytest.mark.parametrize("name", ["glmasr", "audioflamingo3"])
def test_audio_that_is_too_short_for_an_embedding_is_refused(name: str, opened: Opened) -> None:
    with pytest.raises(InvalidRequest, match="1 samples, too few for one embedding"):
        opened(name).prepare(opened(name).placeholder, [sound(1)])


@pytest.mark.parametrize("name", ["audioflamingo3", "moss_transcribe_diarize"])
def test_a_processor_with_other_windows_than_the_encoders_is_refused(name: str, opened: Opened, tmp_path: Path) -> None:
    checkpoint, folder = opened(name), make_checkpoint(name, tmp_path)
    rewrite(folder / "processor_config.json", feature_extractor=lambda old: {**old, "chunk_length": 30})
    with pytest.raises(CheckpointError, match=r"makes 3000 frames; config.json asks for \d+"):
        make_preparer(folder, checkpoint.family, checkpoint.config, checkpoint.tokenizer)


def test_a_processor_that_cannot_read_audio_alone_is_refused(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = opened("glmasr")
    monkeypatch.setattr("triolet.models.architectures.heard.load_part", lambda *_, **__: SimpleNamespace())
    with pytest.raises(UnsupportedModel, match=r"has no _process_audio; allowed: transformers 5\.23"):
        make_preparer(checkpoint.folder, checkpoint.family, checkpoint.config, checkpoint.tokenizer)


@pytest.mark.parametrize(
    ("name", "mark"),
    [
        ("qwen2_vl", "<|video_pad|>"),
        ("qwen2_5_vl", "<|video_pad|>"),
        ("gemma4_vision", "<|video|>"),
        ("gemma4_vision", "<|audio|>"),
    ],
)
def test_a_medium_that_is_not_read_is_refused_in_text_and_tokens(name: str, mark: str, opened: Opened) -> None:
    checkpoint = opened(name)
    told = re.escape(f"the prompt has {mark}, but the model reads only image; leave it out")
    with pytest.raises(InvalidRequest, match=told):
        checkpoint.prepare(f"see {mark}", [])
    with pytest.raises(InvalidRequest, match=told):
        checkpoint.prepare([1, checkpoint.tokenizer.convert_tokens_to_ids(mark)], [])


def test_a_feature_extractor_with_another_window_than_the_models_is_refused(
    hearing: Checkpoint, tmp_path: Path
) -> None:
    folder = make_checkpoint("qwen2_audio", tmp_path)
    doubled = dict.fromkeys(("chunk_length", "n_samples", "nb_max_frames"), lambda old: 2 * old)
    rewrite(folder / "preprocessor_config.json", **doubled)
    with pytest.raises(CheckpointError, match=r"makes 200 frames; config.json asks for 100"):
        make_preparer(folder, hearing.family, hearing.config, hearing.tokenizer)


# -- text alone ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["llama", "qwen3", "bert"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(make_checkpoint(request.param, tmp_path_factory.mktemp(request.param)))


def test_text_has_the_tokenizers_own_special_tokens(tokenizer: Any) -> None:
    preparer = TextPreparer.of(tokenizer)
    assert preparer.media == frozenset()
    assert preparer.prepare("some text") == Prepared(token_ids=tuple(tokenizer("some text")["input_ids"]))
    assert preparer.prepare([5, 6, 7]) == Prepared(token_ids=(5, 6, 7))


def test_plain_text_is_not_lost_by_a_template_that_reads_parts_alone(opened) -> None:
    """As those of LLaVA's own checkpoints."""
    template = (
        "{% for message in messages %}{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}"
        "{{ part['text'] }};{% endfor %}{% endfor %}"
    )
    preparer = attrs.evolve(opened("llava").preparer, chat_template=template)
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]
    assert preparer.render(messages) == "be brief;hi;"


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_a_conversation_has_the_tokens_of_the_template_and_no_more(name: str, tmp_path: Path) -> None:
    """Llama's and Gemma's tokenizers begin every text with a token that their templates have written already."""
    tokenizer = AutoTokenizer.from_pretrained(make_checkpoint(name, tmp_path))
    preparer = TextPreparer.of(tokenizer)
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    assert preparer.converses
    rendered = preparer.render(messages)
    assert isinstance(rendered, Rendered)
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert preparer.prepare(rendered) == Prepared(token_ids=tuple(expected))
    assert preparer.prepare(str(rendered)) == Prepared(token_ids=tuple(tokenizer(rendered)["input_ids"]))


def test_a_model_of_text_refuses_images_and_audio(tokenizer: Any) -> None:
    preparer = TextPreparer.of(tokenizer)
    with pytest.raises(InvalidRequest, match="1 images, but the model reads text only; leave them out"):
        preparer.prepare("see", images=[picture(9, 9)])
    with pytest.raises(InvalidRequest, match="2 audio, but the model reads text only; leave them out"):
        preparer.prepare("hear", audio=[sound(9), sound(9)])


def test_messages_that_the_template_refuses_are_told(tmp_path: Path) -> None:
    preparer = TextPreparer.of(AutoTokenizer.from_pretrained(make_checkpoint("llama", tmp_path)))
    with pytest.raises(InvalidRequest, match=r"chat template refuses the messages: .*roles are system, user"):
        preparer.render([{"role": "critic", "content": "hm"}])
    with pytest.raises(InvalidRequest, match="messages is empty; give one message or more"):
        preparer.render([])


def test_a_checkpoint_without_a_chat_template_says_so(tmp_path: Path) -> None:
    preparer = TextPreparer.of(AutoTokenizer.from_pretrained(make_checkpoint("bert", tmp_path)))
    assert not preparer.converses
    with pytest.raises(InvalidRequest, match="no chat template; write the prompt as text"):
        preparer.render([{"role": "user", "content": "hi"}])


def test_what_is_no_character_is_told_and_not_tokenized(tokenizer: Any) -> None:
    """A file name or argument that is no text has halves of surrogate pairs in Python."""
    preparer = TextPreparer.of(tokenizer)
    told = r"a text has '\\udcff' at character 3: half of a surrogate pair"
    with pytest.raises(InvalidRequest, match=told):
        preparer.prepare("abc\udcff")
    with pytest.raises(InvalidRequest, match=told):
        preparer.prepare_pair("abc", "abc\udcff")


def test_a_tokenizer_that_was_saved_with_truncation_and_padding_does_neither(tmp_path: Path) -> None:
    """It turns them off on its first call, which must not be one of several at once."""
    folder = make_checkpoint("llama", tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    expected = tuple(tokenizer("some long text")["input_ids"])
    tokenizer("a long text", truncation=True, padding="max_length", max_length=4)
    tokenizer.save_pretrained(folder)
    saved = AutoTokenizer.from_pretrained(folder)
    assert saved.backend_tokenizer.truncation is not None
    preparer = TextPreparer.of(saved)
    assert saved.backend_tokenizer.truncation is saved.backend_tokenizer.padding is None
    assert preparer.prepare("some long text") == Prepared(token_ids=expected)
