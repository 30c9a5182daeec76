"""Models of several languages whose decoder begins with a prompt that names the language, as `SpeechModel`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from attrs import evolve, field, frozen

from ...core.errors import CheckpointError
from ...core.model import ModelDescription
from ...core.speech import SAMPLING, Ask, Detection, Sound, SpeechFacts
from ..architectures.items import AudioItems
from ..architectures.prompts import tokenize
from ..checkpoints.loading import load_part
from .plain import PlainSpeech

Prompts = Mapping[tuple[str, str, bool], tuple[int, ...]]
"""The tokens of each prompt, by the code of the language, the task and whether the text has punctuation."""


@frozen(kw_only=True, slots=False)
class PromptedSpeech(PlainSpeech):
    """An encoder-decoder behind the seam that must be given the language. ``prompts`` are those of the checkpoint's own
    processor."""

    prompts: Prompts = field(repr=False)
    facts: SpeechFacts = field(init=False)

    @facts.default
    def _facts(self) -> SpeechFacts:
        return evolve(
            super()._facts(),
            most_tokens=self.model.max_positions - max(map(len, self.prompts.values())),
            languages=tuple(dict.fromkeys(language for language, _, _ in self.prompts)),
            detection=Detection.NAMED,
            tasks=tuple(dict.fromkeys(task for _, task, _ in self.prompts)),
            options=SAMPLING | {"punctuation"},
        )

    def prompt(self, sound: Sound, ask: Ask) -> tuple[int, ...]:  # noqa: ARG002  (see `PlainSpeech`)
        """Returns the tokens before the text."""
        assert ask.language is not None, "a model that does not detect the language is given one"
        assert isinstance(self.model.preparer, AudioItems), "an encoder-decoder that reads audio has it"
        return self.model.preparer.begin(self.prompts[ask.language, ask.task, ask.punctuation])


def cohere_speech(description: ModelDescription, checkpoint: Any) -> PromptedSpeech:
    """Returns the speech model of Cohere Transcribe, with the languages whose tokens the tokenizer has."""
    from transformers.models.cohere_asr.processing_cohere_asr import LANGUAGES

    processor = load_part("CohereAsrProcessor", checkpoint.folder)
    prompts = {
        (code, "transcribe", points): tuple(processor.get_decoder_prompt_ids(code, points))
        for code in _known(sorted(LANGUAGES), checkpoint)
        for points in (True, False)
    }
    return PromptedSpeech(model=description, prompts=prompts)


def canary_speech(description: ModelDescription, checkpoint: Any) -> PromptedSpeech:
    """Returns the speech model of Canary, which also translates into English."""
    from transformers.models.canary.processing_canary import LANGUAGE_CODE_TO_NAME

    processor, codes = load_part("CanaryProcessor", checkpoint.folder), _known(LANGUAGE_CODE_TO_NAME, checkpoint)
    if not processor.chat_template:
        raise CheckpointError(f"{checkpoint.folder} has no chat template, which writes the prompt; download it again")
    tasks = {"transcribe": None, **({"translate": "en"} if "en" in codes else {})}
    asked = [(code, task) for task in tasks for code in codes]
    prompts: dict[tuple[str, str, bool], tuple[int, ...]] = {}
    for points in (True, False):
        texts = processor.apply_transcription_request(
            [np.zeros(1, np.float32)] * len(asked),
            source_language=[code for code, _ in asked],
            target_language=[tasks[task] or code for code, task in asked],
            punctuation=points,
            tokenize=False,
        )
        for one, text in zip(asked, texts, strict=True):
            prompts[*one, points] = tokenize(checkpoint.tokenizer, text, special=False)
    return PromptedSpeech(model=description, prompts=prompts)


def _known(languages: Iterable[str], checkpoint: Any) -> list[str]:
    """Returns the codes of the languages whose tokens the tokenizer has."""
    vocabulary = checkpoint.tokenizer.get_vocab()
    found = [code for code in languages if f"<|{code}|>" in vocabulary]
    if not found:
        raise CheckpointError(
            f"the tokenizer of {checkpoint.folder} has no token of a language, such as <|en|>; download it again"
        )
    return found
