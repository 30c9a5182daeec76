"""`PlacedSpeech`: transcriptions by models that read audio among the tokens of a prompt, which is the one that the
checkpoint's own processor writes.

The processors of some models need further packages in transformers. Their prompts are written here, as these processors
and the cards of the models write them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from attrs import evolve, field, frozen

from ...core.errors import CheckpointError
from ...core.request import most_tokens
from ...core.speech import SAMPLING, Ask, Detection, Draft, Sound, Span, SpeechFacts, WindowCut, continuing
from ..architectures.conversations import Rendered, render
from ..architectures.prompts import MediaPreparer
from .plain import PlainSpeech
from .writings import ReadTurns, WrittenTurn, bracketed, joined, json_turns, placed, plain, unquoted

# -- prompts -----------------------------------------------------------------------------------------------------------


WritePrompt = Callable[..., str]
"""Writes the prompt of a preparer's model, with one placeholder."""

_VOXTRAL_LANGUAGES = ("ar", "de", "en", "es", "fr", "hi", "it", "nl", "pt")
_FUN_LANGUAGES = {"en": "英文", "ja": "日文", "zh": "中文"}
_GRANITE_QUESTION = "can you transcribe the speech into a written format?"


def voxtral_prompt(preparer: MediaPreparer, *, language: str = "") -> str:
    """Returns the request for a transcription as mistral_common encodes it."""
    named = f"lang:{language}" if language else ""
    return f"{preparer.tokenizer.bos_token}[INST]{preparer.written}[/INST]{named}[TRANSCRIBE]"


def no_prompt(preparer: MediaPreparer) -> str:  # noqa: ARG001  (see `WritePrompt`)
    """Returns an empty text: the preparer itself begins a text in step with the audio."""
    return ""


def granite_prompt(preparer: MediaPreparer, *, task: str = "", keywords: str = "", between: str = "") -> str:
    """Returns the question of the card of Granite Speech, with ``between`` before it."""
    asked = "translate the speech to English" if task == "translate" else _GRANITE_QUESTION
    listed = f" Keywords: {keywords}" if keywords else ""
    return _asked(preparer, f"{preparer.written}{between}{asked}{listed}")


def phi4_prompt(preparer: MediaPreparer, *, task: str = "") -> str:
    """Returns the question of the card of Phi-4-multimodal."""
    asked = "Translate the audio to English." if task == "translate" else "Transcribe the audio clip into text."
    return _asked(preparer, f"{preparer.written}{asked}")


def fun_asr_prompt(preparer: MediaPreparer, *, prompt: str = "", keywords: str = "", language: str = "") -> str:
    """Returns the request that the processor of Fun-ASR-Nano makes of the checkpoint's chat template."""
    parts = {"text": prompt, "keywords": keywords and [keywords], "language": language}
    given = [{"type": kind, kind: value} for kind, value in parts.items() if value]
    return _asked(preparer, [{"type": "audio"}, *given])


def _asked(preparer: MediaPreparer, content: Any) -> str:
    return render(preparer.tokenizer, [{"role": "user", "content": content}], template=preparer.chat_template)


TOWERS: Mapping[str, Mapping[str, Any]] = {
    "voxtral": {"write": voxtral_prompt, "languages": {code: code for code in _VOXTRAL_LANGUAGES}},
    "voxtral_realtime": {"write": no_prompt, "begins": False},
    "kyutai_speech_to_text": {"write": no_prompt, "begins": False},
    "granite_speech": {"write": granite_prompt, "hotwords": "keywords", "tasks": ("transcribe", "translate")},
    "granite_speech_plus": {"write": partial(granite_prompt, between=" "), "hotwords": "keywords"},
    "phi4_multimodal": {"write": phi4_prompt, "tasks": ("transcribe", "translate")},
    "fun_asr_nano": {"write": fun_asr_prompt, "hotwords": "keywords", "prompt": "prompt", "languages": _FUN_LANGUAGES},
}
"""The arguments of each model's `Manner`, by its ``model_type``."""


# -- models ------------------------------------------------------------------------------------------------------------


_STEPS = 100  # of times, in a second
_LEAST_TOKENS, _TOKENS = 64, 32  # of a text: at most these, and so many for each second; nobody says more
_SHORT, _LONG = 30.0, 3600.0  # seconds of a window
_MOST_PARTS = 4  # tokens of one character


@frozen(kw_only=True)
class Manner:
    """The way in which one architecture is asked for a text, and writes it.

    Args:
        read: reads the text that the model wrote.
        in_turns: the model writes turns with their times and speakers. Its windows are long, since it knows a speaker
            in one window only. Other models have a segment for each window, so their windows are short.
        hotwords: the argument of the processor's ``apply_transcription_request`` that takes hotwords; "": none does.
        prompt: the argument that takes a description of the audio; "": none does.
        languages: the names of the languages that the model knows, by code; empty: none can be named.
        marker: the token between the language and the text, if the model writes the language.
        tasks: see `SpeechFacts.tasks`.
        begins: the text may begin with given tokens, if nothing stands between the prompt and the text.
        write: writes the prompt with these arguments, where the processor of transformers cannot be used.
    """

    read: ReadTurns = plain
    in_turns: bool = False
    hotwords: str = ""
    prompt: str = ""
    languages: Mapping[str, str] = field(factory=dict)
    marker: str = ""
    tasks: tuple[str, ...] = ("transcribe",)
    begins: bool = True
    write: WritePrompt | None = None

    def prompt_for(self, preparer: MediaPreparer, ask: Ask) -> str:
        """Returns the prompt of a window, with one placeholder."""
        given: dict[str, Any] = {self.hotwords: ask.hotwords}
        given[self.prompt] = "\n".join(filter(None, [ask.prompt, given.get(self.prompt)]))
        given["language"] = None if ask.language is None else self.languages[ask.language]
        wanted = {name: value for name, value in given.items() if name and value}
        if len(self.tasks) > 1:
            wanted["task"] = ask.task
        if self.write is not None:
            return self.write(preparer, **wanted)
        request = preparer.processor.processor.apply_transcription_request
        (prompt,) = request(np.zeros(1, np.float32), tokenize=False, **wanted)
        return str(prompt)


def find_manner(model_type: object) -> Manner | None:
    """Returns the manner of a ``model_type`` of transformers; ``None``: it does not transcribe."""
    if model_type == "qwen3_asr":
        from transformers.models.qwen3_asr.processing_qwen3_asr import LANGUAGE_CODE_TO_NAME

        return Manner(prompt="prompt", hotwords="prompt", languages=LANGUAGE_CODE_TO_NAME, marker="<asr_text>")
    known: Mapping[object, Manner] = {
        **{name: Manner(**how) for name, how in TOWERS.items()},
        "glmasr": Manner(),
        "audioflamingo3": Manner(read=unquoted),
        "moss_transcribe_diarize": Manner(read=bracketed, in_turns=True, hotwords="keywords"),
        "vibevoice_asr": Manner(read=json_turns, in_turns=True, hotwords="prompt", prompt="prompt"),
    }
    return known.get(model_type)


@frozen(kw_only=True, slots=False)
class PlacedSpeech(PlainSpeech):
    """A language model with an audio encoder behind the seam. ``cache_bytes`` is the size of the encoder cache, which
    a window must not exceed."""

    manner: Manner
    cache_bytes: int
    facts: SpeechFacts = field(init=False)
    _marker: int | None = field(init=False)

    @_marker.default
    def _find_marker(self) -> int | None:
        found = self.model.tokenizer.get_vocab().get(self.manner.marker) if self.manner.marker else None
        if self.manner.marker and found is None:
            raise CheckpointError(
                f"the tokenizer has no token {self.manner.marker}, which stands between the language and the text; "
                "download the checkpoint again"
            )
        return found

    @facts.default
    def _facts(self) -> SpeechFacts:
        manner = self.manner
        begins = manner.begins and manner.read is plain and not manner.marker
        options = {"hotwords": manner.hotwords, "initial_prompt": manner.prompt, "prefix": begins}
        return SpeechFacts(
            window_samples=self._window(),
            step_samples=self.model.sampling_rate // _STEPS,
            most_tokens=self.model.max_positions // 2,  # see `_window`
            languages=tuple(manner.languages),
            detection=Detection.WRITTEN if manner.marker else Detection.SILENT,
            tasks=manner.tasks,
            begins=begins,
            names_speakers=manner.in_turns,
            word_fault="it writes times of turns only" if manner.in_turns else "it knows no times",
            options=(SAMPLING - {"prefix"}) | {name for name, has in options.items() if has},
            defaults={"temperature": (0.0,)} if manner.in_turns else {},  # long texts repeat themselves anyway
        )

    @property
    def _preparer(self) -> MediaPreparer:
        assert isinstance(self.model.preparer, MediaPreparer), "a model that reads audio in its prompt has it"
        return self.model.preparer

    def _window(self) -> int:
        """Returns the most samples of a window: as many as the model takes and the encoder cache holds, in half of the
        positions, since the other half is for the text; at least a second's."""
        rate, preparer = self.model.sampling_rate, self._preparer
        longest = getattr(preparer.processor, "longest", None) or round(_LONG * rate)
        tried = min(10 * rate, longest)
        sample = preparer.prepare(preparer.written, audio=[np.zeros(tried, np.float32)])
        (item,) = sample.items
        within = self.model.max_positions // 2 * tried // max(len(sample.token_ids), item.spans[-1][1])
        held = self.cache_bytes * tried // item.size
        wanted = round((_LONG if self.manner.in_turns else _SHORT) * rate)
        return max(min(wanted, longest, within, held), min(rate, longest))

    def hear(self, samples: Any, *, trimmed: bool = False) -> Sound:  # noqa: ARG002  (nothing is filled up)
        """Returns the window, with its features."""
        (heard,) = self._preparer.read_media([self.filled(samples)])
        (item,) = self._preparer.prepare(self._preparer.written, audio=[heard]).items
        return Sound(samples=samples, item=item, heard=evolve(heard, key=item.key))

    def draft(self, sound: Sound, ask: Ask) -> Draft:
        """Returns the draft of a window's text."""
        prompt = Rendered(self.manner.prompt_for(self._preparer, ask))
        prepared = self._preparer.prepare(prompt, audio=[sound.heard])
        token_ids = (*prepared.token_ids, *ask.begun)
        most = _LEAST_TOKENS + _TOKENS * len(sound.samples) // self.model.sampling_rate
        return Draft(
            token_ids=token_ids,
            items=prepared.items,
            rules=self.rules(ask.suppress),
            max_tokens=max(min(most, most_tokens(self.model.max_positions, len(token_ids), prepared.items)), 1),
        )

    def cut(self, token_ids: Sequence[int], ask: Ask) -> WindowCut:
        """Returns the turns as spans, or the whole text as one. A last turn that is unfinished is left out, unless it
        is the only one: the next window begins with it."""
        ids, language = self._after_marker(token_ids)
        if not (self.manner.in_turns and ask.timestamps):
            text = continuing(self.decode(ids))
            return WindowCut((Span(0, None, tuple(token_ids), text=text),), language=language)
        written, ends = self._written(ids)
        turns, seek = placed(self.manner.read(written)), None
        begun = turns[-1].start if len(turns) > 1 and turns[-1].end is None else None
        if begun is not None:
            turns, seek = turns[:-1], round(begun * _STEPS)
        return WindowCut(tuple(_span(turn, ids, ends) for turn in turns), seek, language=language)

    def _after_marker(self, token_ids: Sequence[int]) -> tuple[Sequence[int], str | None]:
        """Returns the tokens of the text, and the code of the language that the model wrote before them."""
        if self._marker is None or self._marker not in token_ids:
            return token_ids, None
        at = token_ids.index(self._marker)
        named = super().decode(token_ids[:at]).strip().removeprefix("language").strip().casefold()
        codes = {name.casefold(): code for code, name in self.manner.languages.items()}
        return token_ids[at + 1 :], codes.get(named)

    def _written(self, token_ids: Sequence[int]) -> tuple[str, list[int]]:
        """Returns the text of the tokens, and where each token ends in it. All tokens of one character end with it."""
        text, ends, begun = list[str](), list[int](), 0
        for stop in range(1, len(token_ids) + 1):
            piece = super().decode(token_ids[begun:stop])
            is_part = piece.endswith("\N{REPLACEMENT CHARACTER}") and stop - begun < _MOST_PARTS
            if is_part and stop < len(token_ids):
                continue
            text.append(piece)
            ends += [(ends[-1] if ends else 0) + len(piece)] * (stop - begun)
            begun = stop
        return "".join(text), ends

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of ``token_ids`` without the language, times and speakers."""
        ids, _ = self._after_marker(token_ids)
        written = super().decode(ids)
        if self.manner.read is plain:
            return written
        return joined([turn.text for turn in self.manner.read(written)])


def _span(turn: WrittenTurn, token_ids: Sequence[int], ends: Sequence[int]) -> Span:
    first = bisect_right(ends, turn.first)
    stop = bisect_right(ends, ends[bisect_left(ends, turn.stop)])  # with all tokens of its last character
    return Span(
        round((turn.start or 0.0) * _STEPS),
        None if turn.end is None else round(turn.end * _STEPS),
        tuple(token_ids[first:stop]),
        first,
        text=continuing(turn.text),
        speaker=turn.speaker,
    )
