"""OpenAI's own client, as it is published, over the server: transcriptions and translations."""

from __future__ import annotations

import base64
import io
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import soundfile

from triolet import Transcript, Word, demo
from triolet.api.formats.settings import SubtitleSettings
from triolet.api.formats.writers import SRT, VTT, WriterSettings, as_verbose_object, written

from ..checkpoints.families import make_checkpoint
from .openai_client import openai_client
from .served import Served, served

pytestmark = pytest.mark.real_time


@pytest.fixture(scope="module")
def transcript(service: Served, speech: Path) -> Transcript:
    """What the engine makes of the sentence without a server."""
    return transcribed(service, speech, timestamps="word")


@pytest.fixture(scope="module")
def german() -> Path:
    return next(sample.path for sample in demo.samples() if "de-command" in str(sample.path))


def transcribed(service: Served, audio: Path, model: str = "whisper", **options: Any) -> Transcript:
    return service.engine(model, lambda engine: engine.transcribe(audio, **options))


def transcribe(client: openai.OpenAI, file: Any, **options: Any) -> Any:
    return client.audio.transcriptions.create(**{"model": "whisper", "file": file, **options})


def speech_of(seconds: float) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.zeros(round(seconds * 16_000)), 16_000, format="WAV")
    return file.getvalue()


def translate(client: openai.OpenAI, file: Any, **options: Any) -> Any:
    with pytest.warns(DeprecationWarning, match="deprecated"):  # so OpenAI's client says of this call
        return client.audio.translations.create(model="whisper", file=file, **options)


# -- the formats -------------------------------------------------------------------------------------------------------


def test_verbose_json_has_the_segments_and_the_words_as_they_are_asked_for(client, speech, transcript):
    ask = partial(transcribe, client, speech, response_format="verbose_json")
    expected = as_verbose_object(transcript)
    told = ask(timestamp_granularities=["segment"])
    assert (told.language, told.duration, told.text) == ("english", expected["duration"], expected["text"])
    assert [one.text for one in told.segments] == [one["text"] for one in expected["segments"]]
    words = ask(timestamp_granularities=["word"])
    assert [one.model_dump() for one in words.words] == expected["words"]
    assert (told.words, words.segments) == (None, None)
    both = ask(timestamp_granularities=["word", "segment"])
    assert (both.words, len(both.segments)) == (words.words, len(told.segments))


def test_where_nobody_speaks_there_is_no_language(client):
    silence = next(sample.path for sample in demo.samples() if "silence" in str(sample.path))
    assert transcribe(client, silence).languages == []
    told = transcribe(client, silence, response_format="verbose_json")
    assert (told.language, told.text, told.segments) == ("", "", [])


# -- the options -------------------------------------------------------------------------------------------------------


def test_a_language_is_not_detected_but_believed(client, service, german):
    expected = transcribed(service, german, language="de")
    told = transcribe(client, german, language="de", response_format="verbose_json")
    assert (told.text, told.language) == (expected.text, "german")


@pytest.mark.parametrize(
    ("asked", "options"),
    [
        ({"prompt": "The cellar of Triolet"}, {"initial_prompt": "The cellar of Triolet"}),
        ({"hotwords": "Åsa, Ödön"}, {"hotwords": "Åsa, Ödön"}),
        ({"hotwords": ["Åsa", "Ödön"]}, {"hotwords": "Åsa, Ödön"}),
        ({"keywords": "Åsa, Ödön"}, {"hotwords": "Åsa, Ödön"}),
        ({"keywords": ["Åsa", "Ödön"]}, {"hotwords": "Åsa, Ödön"}),
    ],
    ids=str,
)
def test_texts_that_are_read_before_have_openais_names_and_faster_whispers(client, service, speech, asked, options):
    told = transcribe(client, speech, model="whisper_random", temperature=0.2, extra_body={"seed": 1, **asked}).text
    engine = partial(transcribed, service, speech, "whisper_random", temperature=0.2, seed=1)
    assert told == engine(**options).text != engine().text


def test_without_the_filter_noise_is_read(client, service, tmp_path):
    soundfile.write(tmp_path / "noise.wav", np.random.default_rng(0).normal(0, 0.01, 16_000), 16_000)
    options, told = {"model": "whisper_random", "temperature": 0.2}, []
    for wanted, voice in ((True, "skip"), (False, "off")):
        asked = {"seed": 1, "vad_filter": wanted}
        told.append(transcribe(client, tmp_path / "noise.wav", extra_body=asked, **options).text)
        assert told[-1] == transcribed(service, tmp_path / "noise.wav", voice_activity=voice, seed=1, **options).text
    assert told[0] == "" != told[1]


def test_subtitles_have_the_rules_of_the_form(client, transcript, speech, german, service):
    rules = {"max_line_width": 20, "max_line_count": 1}
    settings = WriterSettings(subtitles=SubtitleSettings(**rules))
    told = transcribe(client, speech, response_format="vtt", extra_body=rules)
    assert told == written(transcript, VTT, settings) != written(transcript, VTT)
    told = translate(client, german, response_format="srt", extra_body={"max_words_per_line": 1})
    settings = WriterSettings(subtitles=SubtitleSettings(max_words_per_line=1))
    expected = transcribed(service, german, task="translate", timestamps="word")
    assert told == written(expected, SRT, settings) != written(expected, SRT)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"hotwords": "a", "keywords": ["b"]}, "hotwords is given with keywords"),
        ({"vad_filter": False, "chunking_strategy": "auto"}, "vad_filter=false is given, but chunking_strategy needs"),
        ({"vad_filter": False, "response_format": "diarized_json"}, "vad_filter=false is given, but speakers need"),
        ({"max_line_width": 20}, "max_line_width is given with response_format json; allowed: srt and vtt"),
        ({"max_line_width": 0, "response_format": "srt"}, "max_line_width"),
        ({"keywords": ["a", "b"]}, "hotwords='a, b', which WhisperForConditionalGeneration cannot use; leave it out"),
        ({"language": "klingon"}, "'klingon' is not a language of Whisper"),
        ({"language": "auto", "audio_track": "0"}, "audio_track='0'; allowed: the number of an audio track"),
        ({"speakers": "many"}, "speakers='many'; allowed: 'any', a number of speakers"),
        ({"file": b""}, "the file is empty (0 bytes)"),
        ({"file": b"text"}, "the file is not audio that can be decoded"),
        ({"file": speech_of(0.01)}, "the file lasts 0.0100 s; allowed: 0.02 s of audio or more"),
        ({"timestamp_granularities": "word"}, "timestamp_granularities needs response_format=verbose_json"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_fit_together_is_refused_in_the_words_of_clients(client, speech, given, message):
    given = dict(given)
    with pytest.raises(openai.APIStatusError, match=re.escape(message)) as raised:
        transcribe(client, given.pop("file", speech), extra_body=given)
    assert not re.search(r"\b(None|True|False|array|the bytes|timestamps|\w+_prompt)\b", raised.value.body["message"])


def test_a_form_is_taken_as_clients_send_it(client, transcript, speech):
    """Empty members, texts for no language, a list of one item without brackets, and a member of all other requests."""
    empty = dict.fromkeys(("prompt", "temperature", "language", "hotwords", "include[]", "response_format"), "")
    for sent in ({**empty, "user": "me"}, {"language": "auto"}, {"language": "None"}):
        assert transcribe(client, speech, extra_body=sent).text == transcript.text
    sent = {"timestamp_granularities": "word", "language": " AUTO", "store": "false"}
    assert transcribe(client, speech, response_format="verbose_json", extra_body=sent).words
    with pytest.raises(openai.BadRequestError, match="nothing is not a member"):
        transcribe(client, speech, extra_body={"nothing": ""})


@pytest.mark.parametrize("strategy", ["auto", {"type": "server_vad"}])
def test_with_a_chunking_strategy_the_pieces_are_read_at_the_same_time(client, service, strategy):
    recording = next(sample.path for sample in demo.samples() if "de-pause" in str(sample.path))
    expected = transcribed(service, recording, parallel=True)
    told = transcribe(client, recording, chunking_strategy=strategy, response_format="verbose_json")
    assert [one.text for one in told.segments] == [one.text for one in expected.segments]


def test_logprobs_are_told_of_every_token(client, speech, transcript):
    told = transcribe(client, speech, include=["logprobs"]).logprobs
    expected = [value for segment in transcript.segments for value in segment.logprobs]
    assert [one.logprob for one in told] == pytest.approx(expected, abs=1e-3)
    assert bytes(int(byte) for one in told for byte in one.bytes).decode().strip() == transcript.text


def test_audio_may_be_bytes_with_a_name_and_any_format(client, speech, transcript, tmp_path):
    samples, rate = soundfile.read(speech)
    soundfile.write(tmp_path / "speech.ogg", samples, rate)
    assert transcribe(client, ("speech.ogg", (tmp_path / "speech.ogg").read_bytes(), "audio/ogg")).text
    assert transcribe(client, speech.read_bytes()).text == transcript.text


# -- streams -----------------------------------------------------------------------------------------------------------


def test_a_stream_tells_the_text_piece_by_piece_and_then_whole_each_with_its_logprobs(client, service):
    recording = next(sample.path for sample in demo.samples() if "de-pause" in str(sample.path))
    expected = transcribed(service, recording)
    *deltas, done = transcribe(client, recording, stream=True, include=["logprobs"])
    assert {one.type for one in deltas} == {"transcript.text.delta"}
    assert len(deltas) == len(expected.segments) > 1
    assert (done.type, done.text) == ("transcript.text.done", expected.text)
    assert "".join(one.delta for one in deltas) == done.text
    assert [one.code for one in done.languages] == ["de"]
    told = [one.to_dict() for delta in deltas for one in delta.logprobs]
    assert told == [one.to_dict() for one in done.logprobs] != []


# -- who speaks --------------------------------------------------------------------------------------------------------


class OneWord:
    async def align(self, audio: Any, text: str, language: str | None = None) -> list[Word]:
        return [Word(text=text, start=0.25, end=0.5, probability=1.0)]


def test_an_aligner_of_the_server_finds_words_of_models_that_know_no_times(tmp_path, speech):
    models = {"speech": str(make_checkpoint("qwen3_asr", tmp_path)), "whisper": demo.checkpoint()}
    with served(models) as running, openai_client(running) as client:
        heard = partial(transcribe, client, speech, extra_body={"seed": 1})  # else texts differ each time, one is empty
        ask = partial(heard, response_format="verbose_json", timestamp_granularities=["word"])
        with pytest.raises(openai.BadRequestError, match=r"\[\]=word, but .* Allowed: .*\[\]=segment, or an aligner"):
            ask(model="speech")
        running.server.aligner = OneWord()  # type: ignore[assignment]
        told = ask(model="speech")
        assert [one.word for one in told.words] == [told.text]
        assert len(ask(model="whisper").words) > 1
        segments = heard(model="speech", response_format="diarized_json").segments
        assert [round(one.end - one.start, 3) for one in segments] == [0.25], "that of their words"


@pytest.fixture(scope="module")
def dialogue(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The beginnings of two recordings of the toy, one after the other."""
    paths = [one.path for one in demo.samples() if "-many" in str(one.path)][:2]
    voices = [soundfile.read(path, dtype="float32", frames=10 * 16_000) for path in paths]
    path = tmp_path_factory.mktemp("dialogue") / "dialogue.wav"
    pause = np.zeros(16_000, np.float32)
    soundfile.write(path, np.concatenate([part for voice, _ in voices for part in (voice, pause)]), 16_000)
    return path


def data_url(path: Path, seconds: float = 60.0) -> str:
    samples, rate = soundfile.read(path, frames=round(seconds * 16_000))
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format="WAV")
    return "data:audio/wav;base64," + base64.b64encode(file.getvalue()).decode()


def test_diarized_json_has_the_speakers_whole_and_as_a_stream(client, service, dialogue):
    expected = transcribed(service, dialogue, speakers=True)
    told = transcribe(client, dialogue, response_format="diarized_json")
    assert (told.task, told.duration, told.text) == ("transcribe", expected.duration, expected.text)
    assert [(one.start, one.end, one.speaker, one.text) for one in told.segments] == [
        (one.start, one.end, one.speaker, one.text.strip()) for one in expected.segments
    ]
    assert len({one.id for one in told.segments}) == len(told.segments) > 1
    assert told.usage.type == "duration"
    events = list(transcribe(client, dialogue, response_format="diarized_json", stream=True))
    assert [one for one in events if one.type == "transcript.text.segment"] == [
        type(events[-2]).construct(**one.model_dump()) for one in told.segments
    ]
    kinds = [one.type.rpartition(".")[2] for one in events]
    assert kinds == sorted(kinds, key=["delta", "segment", "done"].index)
    assert "".join(one.delta for one in events if one.type == "transcript.text.delta") == events[-1].text == told.text


def test_known_speakers_have_their_names(client, speech, dialogue):
    known = {"known_speaker_names": ["Ada"], "known_speaker_references": [data_url(speech)]}
    told = transcribe(client, speech, response_format="diarized_json", **known)
    assert [one.speaker for one in told.segments] == ["Ada"]
    subtitles = transcribe(client, speech, response_format="vtt", extra_body={"speakers": "1"}, **known)
    assert "<v Ada>" in str(subtitles)
    assert str(transcribe(client, speech, response_format="text", extra_body={"speakers": "any"})).startswith("A: ")
    many = transcribe(client, dialogue, response_format="verbose_json", extra_body={"speakers": "2"})
    assert {one.speaker for one in many.segments} <= {"A", "B"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"known_speaker_names": ["Ada"]},
            "1 different names, known_speaker_references 0 items; allowed: a reference",
        ),
        ({"known_speaker_names": ["A", "A"], "known_speaker_references": ["", ""]}, "1 different names"),
        ({"known_speaker_names": ["Ada"], "known_speaker_references": ["Ada"]}, "the address begins with 'ada'"),
        ({"speakers": "0"}, "speakers='0'; allowed: 'any', a number of speakers \\(1 to 50"),
        (
            {"speakers": "1", "known_speaker_names": ["A", "B"], "known_speaker_references": ["data:,"] * 2},
            "2 names",
        ),
    ],
)
def test_speakers_that_make_no_sense_are_refused_before_a_stream_begins(client, speech, given, message, stream):
    with pytest.raises(openai.BadRequestError, match=message):
        transcribe(client, speech, response_format="diarized_json", stream=stream, extra_body=given)


def test_a_reference_that_is_too_short_or_no_audio_is_refused(client, speech):
    known = {"known_speaker_names": ["Ada"], "known_speaker_references": [data_url(speech, 1.2)]}
    with pytest.raises(openai.BadRequestError, match=r"the known speaker 'Ada' has .* allowed: 1.6 s of speech"):
        transcribe(client, speech, response_format="diarized_json", **known)
    with pytest.raises(openai.BadRequestError, match="needs response_format=diarized_json, or speakers"):
        transcribe(client, speech, **known)
    known["known_speaker_references"] = ["data:audio/wav;base64,UklGRg=="]
    with pytest.raises(openai.BadRequestError, match=r"the known speaker 'Ada': .* not audio that can be decoded"):
        transcribe(client, speech, response_format="diarized_json", **known)


# -- translations ------------------------------------------------------------------------------------------------------


def test_translations_are_in_english_in_every_format(client, service, german):
    expected = transcribed(service, german, task="translate")
    assert translate(client, german).text == expected.text
    assert translate(client, german, response_format="text") == expected.text + "\n"
    assert translate(client, german, response_format="srt") == written(expected, SRT)
    assert translate(client, german, response_format="vtt") == written(expected, VTT)
    told = translate(client, german, response_format="verbose_json")
    assert (told.text, told.language) == (expected.text, "english")
    assert [one.text for one in told.segments] == [one.text for one in expected.segments]
