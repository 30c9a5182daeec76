"""``/v1/audio/transcriptions`` and ``/v1/audio/translations``."""

from __future__ import annotations

import math
import re
from collections.abc import Container
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from ...api.engine import Engine
from ...api.formats.settings import SubtitleSettings
from ...api.formats.writers import SRT, TEXT, VTT, WriterSettings, as_line, as_verbose_object, written
from ...api.inputs.sources import NamedPath
from ...api.outputs.results import Segment, Transcript, spans_told
from ...api.speech.options import OPTIONS, read_options
from ...core.detokenizer import TokenBytes
from ..body import audio_of, read_form
from ..event_stream import Events, EventStream
from ..problems import in_their_words
from ..schemas import speech as bodies
from .common import answered, engine_of, exchange_of, in_header, server_of
from .sampling import token_text

_SUBTITLES = {"srt": SRT, "vtt": VTT}
_HINT = re.compile(r"; (\w+)=[^;]*$")  # at the end of a warning
_MOST_REFERENCE = 8 * 2**20  # bytes of a known speaker's audio


async def transcribe(request: Request) -> Response:
    """The text of an audio file, in the language that is spoken."""
    form, upload = await read_form(request, bodies.TranscriptionForm, server_of(request).settings.spool_bytes)
    options = _options(form)
    if form.keywords is not None:
        options["hotwords"] = form.keywords
    if "word" in form.timestamp_granularities:
        options["timestamps"] = "word"
    options["parallel"] = form.chunking_strategy is not None
    if form.response_format == "diarized_json":
        options.setdefault("speakers", True)
    media, where = server_of(request).media, "known_speaker_references"
    options["known_speakers"] = {
        name: await media.fetch(url, where, _MOST_REFERENCE, account=exchange_of(request).account)
        for name, url in zip(form.known_speaker_names, form.known_speaker_references, strict=True)
    }
    read_options(options)  # a wrong value is refused before a stream begins
    if form.stream:
        return EventStream(partial(_streamed, request, form, audio_of(upload), options), named=True)
    return await _whole(request, form, audio_of(upload), options)


async def translate(request: Request) -> Response:
    """The text of an audio file, in English."""
    form, upload = await read_form(request, bodies.TranslationForm, server_of(request).settings.spool_bytes)
    return await _whole(request, form, audio_of(upload), {**_options(form), "task": "translate"})


def _options(form: bodies.SpeechForm) -> dict[str, Any]:
    """Returns the options of a transcription that the form sets; `Option.form` names the member for each option."""
    given = {name: getattr(form, one.form) for name, one in OPTIONS.items() if one.form is not None}
    given["temperature"] = form.temperature or None  # in OpenAI's API 0 asks for all temperatures
    given["voice_activity"] = "off" if form.vad_filter is False else None
    given["timestamps"] = "word" if form.subtitles else None
    return {"seed": form.seed, **{name: value for name, value in given.items() if value is not None}}


async def _whole(
    request: Request, form: bodies.SpeechForm, audio: bytes | NamedPath, options: dict[str, Any]
) -> Response:
    transcript, logprobs = await _read(request, form, audio, options)
    more = _warnings(transcript)
    answer = _answer(form, transcript, {**logprobs, **more})
    if more:
        answer.headers["x-triolet-warnings"] = in_header(more["warnings"])
    return answer


def _answer(form: bodies.SpeechForm, transcript: Transcript, more: dict[str, Any]) -> Response:
    """Returns the answer in the format of ``form``. ``more`` are further members of JSON."""
    if form.response_format in _SUBTITLES:
        kind = "text/vtt" if form.response_format == "vtt" else "application/x-subrip"
        rules = WriterSettings(subtitles=SubtitleSettings(**form.subtitles))
        return PlainTextResponse(written(transcript, _SUBTITLES[form.response_format], rules), media_type=kind)
    if form.response_format == "text":
        return PlainTextResponse(written(transcript, TEXT) if transcript.speakers else transcript.text + "\n")
    usage = bodies.DurationUsage(type="duration", seconds=math.ceil(transcript.duration))
    if form.response_format == "diarized_json":
        segments = _diarized(transcript)
        return answered(
            bodies.DiarizedAnswer(
                task="transcribe",
                duration=transcript.duration,
                text=transcript.text,
                segments=segments,
                usage=usage,
                **more,
            )
        )
    if form.response_format == "verbose_json":
        told = {**_verbose(transcript, form), "usage": usage.model_dump(), **more}
        return Response(as_line(told), media_type="application/json")
    answer = bodies.TranscriptionAnswer(text=transcript.text, usage=usage, **more)
    if transcript.task == "transcribe":
        answer.languages = _languages(transcript)
    return answered(answer)


async def _streamed(
    request: Request, form: bodies.TranscriptionForm, audio: bytes | NamedPath, options: dict[str, Any], events: Events
) -> None:
    transcript, logprobs = await _read(request, form, audio, options, events)
    if form.response_format == "diarized_json":
        for segment in _diarized(transcript):
            await events.write(segment)
    more, languages = {**logprobs, **_warnings(transcript)}, _languages(transcript)
    done = bodies.TextDone(type="transcript.text.done", text=transcript.text, languages=languages, **more)
    await events.write(done, last=True)


async def _read(
    request: Request,
    form: bodies.SpeechForm,
    audio: bytes | NamedPath,
    options: dict[str, Any],
    events: Events | None = None,
) -> tuple[Transcript, dict[str, Any]]:
    """Returns the transcript, and the log-probabilities of its tokens if the client wants them. Each segment is sent to
    ``events``."""
    exchange, most = exchange_of(request), server_of(request).settings.max_audio_seconds
    all_logprobs: dict[str, Any] = {"logprobs": []} if "logprobs" in getattr(form, "include", ()) else {}
    options = {"priority": form.priority, "request_id": exchange.id, "max_audio_seconds": most, **options}
    async with (
        engine_of(request, form.model) as engine,
        engine.stream_transcription(audio, **(options | _aligner(request, engine, options))) as segments,
    ):
        async for segment in segments:
            more: dict[str, Any] = {"logprobs": _logprobs(engine.inside.token_bytes(), segment)} if all_logprobs else {}
            for name, found in more.items():
                all_logprobs[name] += found
            if events is not None:
                text = segment.text if segment.id else segment.text.lstrip()  # the joined texts are the whole text
                more |= _times(segment) if getattr(form, "timestamp_granularities", ()) else {}
                more |= {"language": segment.language} if form.multilingual else {}
                await events.write(bodies.TextDelta(type="transcript.text.delta", delta=text, **more))
        transcript = segments.transcript()
    told = {"audio_seconds": round(transcript.duration, 3), "language": transcript.language, **_warnings(transcript)}
    exchange.ended(transcript.timings, **told)
    return transcript, all_logprobs


def _aligner(request: Request, engine: Engine, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the server's aligner as an option, if times of words are needed, by the client or to tell speakers apart,
    and the model knows none."""
    aligner, speech = server_of(request).aligner, engine.model.speech
    if aligner is None or speech is None or speech.facts.word_times is not None or options.get("task") == "translate":
        return {}
    finds_speakers = options.get("speakers") is not None and not speech.facts.names_speakers
    return {"aligner": aligner, "timestamps": "word"} if finds_speakers or options.get("timestamps") == "word" else {}


def _diarized(transcript: Transcript) -> list[bodies.DiarizedSegment]:
    """Returns the segments with their speakers. If no voice could be told from others, all have the first letter."""
    return [
        bodies.DiarizedSegment(
            type="transcript.text.segment",
            id=f"seg_{one.id + 1:03d}",
            start=one.start,
            end=one.end,
            text=one.text.strip(),
            speaker=one.speaker or "A",
            **({} if one.language is None else {"language": one.language}),
        )
        for one in transcript.segments
    ]


def _times(segment: Segment) -> dict[str, Any]:
    words = [bodies.VerboseWord(word=one.text.strip(), start=one.start, end=one.end) for one in segment.words or ()]
    return {"start": segment.start, "end": segment.end, **({} if segment.words is None else {"words": words})}


def _logprobs(tokens: TokenBytes, segment: Segment) -> list[bodies.SpeechLogprob]:
    told = []
    for token, logprob in zip(segment.token_ids, segment.logprobs or (), strict=True):
        text, utf8 = token_text(tokens, token)
        told.append(bodies.SpeechLogprob(token=text, logprob=logprob, **({} if utf8 is None else {"bytes": utf8})))
    return told


def _languages(transcript: Transcript) -> list[bodies.SpokenLanguage]:
    return [bodies.SpokenLanguage(code=code) for code in transcript.languages]


def warnings_of(transcript: Transcript, members: Container[str]) -> list[str]:
    """Returns the warnings of a transcript in the words of clients, and one about speech that has no text. Hints on
    what is none of the client's ``members`` are left out."""
    told = [in_their_words(each) for each in transcript.warnings]
    told = [_HINT.sub(lambda hint: hint[0] if hint[1] in members else "", each) for each in told]
    failed = [(one.start, one.end) for one in transcript.coverage if one.kind == "failed"]
    if failed:
        seconds = sum(end - start for start, end in failed)
        told.append(f"{seconds:.2f} s of the audio may be speech, but have no text: {spans_told(failed)}")
    return told


def _warnings(transcript: Transcript) -> dict[str, list[str]]:
    """Returns the member with the warnings, if there are any."""
    found = warnings_of(transcript, bodies.SpeechForm.model_fields)
    return {"warnings": found} if found else {}


def _verbose(transcript: Transcript, form: bodies.SpeechForm) -> dict[str, Any]:
    told = as_verbose_object(transcript)
    wanted = getattr(form, "timestamp_granularities", ())
    if wanted and "segment" not in wanted:
        del told["segments"]
    if "word" in wanted:
        told.setdefault("words", [])
    language = "english" if transcript.task == "translate" else told["language"] or ""  # OpenAI always sends a text
    return {**told, "language": language}
