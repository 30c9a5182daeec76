"""The family of speech models whose audio encoder writes embeddings among the tokens of a language model's prompt.

`ForcedAligner` has the texts of Qwen3-ForcedAligner (Qwen3-ASR technical report, 2026). The prompt has two marks after
each word, and the model classifies each mark by its time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import field, frozen
from torch import Tensor, nn

from ...core.aligning import TextDraft, Timed, cut_words
from ...core.checks import check_characters
from ...core.errors import CheckpointError, InvalidRequest, UnsupportedModel
from ...core.plan import AlignedTokens
from ...core.request import Alignment
from ..checkpoints.loading import TRIED, apart, load_part, placed
from .conversations import Rendered
from .family import Family
from .prompts import MediaPreparer, ReadItem

# -- texts to align ----------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class ForcedAligner:
    """Implements `triolet.core.aligning.TextAligner` by transformers' processor of the checkpoint, which finds words,
    writes the prompt and mends times that run backwards. ``mark`` is the token of a mark, ``classes`` the number of
    times."""

    preparer: MediaPreparer
    processor: Any = field(repr=False)
    mark: int
    classes: int

    def draft(self, samples: Any, text: str, language: str | None) -> TextDraft:
        """Implements `TextAligner.draft`."""
        rate = self.preparer.sampling_rate
        most = self.classes * self.processor.timestamp_segment_time / 1000
        if len(samples) > most * rate:
            raise InvalidRequest(
                f"the audio lasts {len(samples) / rate:.2f} s; allowed: up to {most:g} s. Align shorter parts"
            )
        check_characters(text)
        spoken = self._spoken(text, language)
        try:
            words = cut_words(text, spoken)
        except ValueError:  # a tokenizer of words may write other characters
            raise InvalidRequest(
                f"the words {spoken!r:.200} are not those of text={text!r:.200}; allowed: a text in the form NFKC"
            ) from None
        alignment = Alignment(start=1, frames=self.classes, marks=self.mark)
        if not spoken:
            return TextDraft(words=words, token_ids=(), items=(), alignment=alignment, places=(None,))
        parts = [{"type": "audio"}, *({"type": "text", "text": word} for word in spoken)]
        prompt = self.processor.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
        prepared = self.preparer.prepare(Rendered(prompt), audio=[samples])
        marks = prepared.token_ids.count(self.mark)
        assert marks == 2 * len(words), f"the chat template wrote {marks} marks for {len(words)} words"
        return TextDraft(
            words=words,
            token_ids=prepared.token_ids,
            items=prepared.items,
            alignment=Alignment(start=prepared.token_ids.index(self.mark), frames=self.classes, marks=self.mark),
            places=tuple((2 * index, 2 * index + 2) for index in range(len(words))),
        )

    def times(self, draft: TextDraft, answer: AlignedTokens) -> tuple[Timed | None, ...]:
        """Implements `TextAligner.times`."""
        chosen = nn.functional.one_hot(torch.tensor(answer.frames), self.classes)[None]
        marks = torch.full((1, len(answer.frames)), self.mark, dtype=torch.long)
        (found,) = self.processor.decode_forced_alignment(chosen, marks, [draft.words], self.mark)
        certain = [math.exp(logprob) for logprob in answer.logprobs]
        return tuple(
            Timed(time["start_time"], time["end_time"], sum(certain[2 * index : 2 * index + 2]) / 2)
            for index, time in enumerate(found)
        )

    def _spoken(self, text: str, language: str | None) -> list[str]:
        """Returns the words of ``text`` as the model knows them, without marks."""
        from transformers.models.qwen3_asr import processing_qwen3_asr as known

        codes = known.LANGUAGE_CODE_TO_NAME
        name = None if language is None else codes.get(language)
        if language is not None and name not in known.FORCED_ALIGNER_LANGUAGES:
            allowed = sorted(code for code in codes if codes[code] in known.FORCED_ALIGNER_LANGUAGES)
            raise InvalidRequest(f"language={language!r}; allowed: {', '.join(allowed)}, or None")
        try:
            spoken: list[str] = self.processor.split_words_for_alignment(text, name)
        except ImportError as error:
            raise InvalidRequest(f"language={language!r} is not allowed here: {error}") from error
        return spoken


# -- the family --------------------------------------------------------------------------------------------------------


_ROWS = "embeddings"  # in a payload: how many rows of the encoder's output are the item's
_TOGETHER = 16  # windows or items of one call; an hour of windows at once would take gigabytes


@frozen(kw_only=True)
class AudioProcessor:
    """transformers' processor of a checkpoint, with its settings for audio. Calling the whole processor is not safe in
    threads, so its part for audio is called alone."""

    processor: Any
    settings: Mapping[str, Any] = field(repr=False)

    @property
    def sampling_rate(self) -> int:
        """The sampling rate of the audio, in Hz."""
        return int(self.processor.feature_extractor.sampling_rate)

    @property
    def longest(self) -> int | None:
        """The most samples of one audio, after which the processor would cut it off; ``None``: it cuts nothing off."""
        if not hasattr(self.processor, "max_audio_len"):
            return None
        window = self.processor.feature_extractor.chunk_length
        return int(self.processor.max_audio_len // window * window) * self.sampling_rate

    def to_json_string(self) -> str:
        """All that the features depend on, as text."""
        return str(self.processor.feature_extractor.to_json_string()) + repr(sorted(self.settings.items()))


@frozen(kw_only=True)
class HeardAudio(Family):
    """A model whose transformers class has ``get_audio_features``. Audio of any length, up to what the processor takes,
    is one item."""

    medium: str = "audio"
    around_audio: tuple[str, str] = ("", "")  # the tokens before and after the placeholder
    options: Mapping[str, Any] = field(factory=dict)  # arguments of `get_audio_features` that no item has
    windows: bool = False  # whether the encoder reads windows of one length alone
    duration: str = ""  # stands in a prompt for the seconds of the next audio
    alone: bool = False  # items are encoded one by one, since the encoder would read the padding of shorter ones

    def encode(self, module: nn.Module, payloads: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """Encodes all items at once, unless they are encoded ``alone``. Shorter ones are padded with zeros, which their
        masks leave out."""
        if self.alone and len(payloads) > 1:
            return [rows for payload in payloads for rows in self.encode(module, [payload])]
        joined = {name: _joined([payload[name] for payload in payloads]) for name in payloads[0] if name != _ROWS}
        cut = [torch.split(value, _TOGETHER) for value in joined.values()]
        made: Any = module if hasattr(module, "get_audio_features") else module.base_model
        rows = list[Tensor]()
        for parts in zip(*cut, strict=True):
            given = placed(module, dict(zip(joined, parts, strict=True)))
            with torch.no_grad():
                rows.append(made.get_audio_features(**given, **self.options).pooler_output.flatten(0, -2))
        return apart(torch.split(torch.cat(rows), [int(payload[_ROWS]) for payload in payloads]))

    def processor(self, folder: Path, config: Any) -> AudioProcessor:
        found = load_part("AutoProcessor", folder, trust_remote_code=False)
        if not hasattr(found, "_process_audio"):
            raise UnsupportedModel(
                f"the {type(found).__name__} of this transformers has no _process_audio; allowed: transformers {TRIED}"
            )
        merged = found._merge_kwargs(tokenizer_init_kwargs=found.tokenizer.init_kwargs)["audio_kwargs"]
        self.check_windows(found.feature_extractor, folder, config)
        rate = found.feature_extractor.sampling_rate
        return AudioProcessor(processor=found, settings={"sampling_rate": rate, **merged, "return_tensors": "pt"})

    def aligner(self, folder: Path, config: Any, preparer: MediaPreparer) -> ForcedAligner:
        processor = self.processor(folder, config).processor
        return ForcedAligner(
            preparer=preparer, processor=processor, mark=config.timestamp_token_id, classes=config.num_labels
        )

    def check_windows(self, extractor: Any, folder: Path, config: Any) -> None:
        """Raises `CheckpointError` if the windows of a feature extractor are not the encoder's."""
        if not self.windows:
            return
        made, wanted = extractor.nb_max_frames, 2 * config.audio_config.max_source_positions
        if made != wanted:
            raise CheckpointError(
                f"the feature extractor of {folder} makes {made} frames; config.json asks for {wanted}. Download both"
            )

    def template(self, processor: Any, tokenizer: Any) -> str | None:
        unneeded = tokenizer.chat_template or not isinstance(processor, AudioProcessor)
        return None if unneeded else processor.processor.chat_template

    def around(self, tokenizer: Any, config: Any) -> tuple[str, str]:  # noqa: ARG002
        return self.around_audio

    def read(self, processor: AudioProcessor, config: Any, token: str, item: np.ndarray[Any, Any]) -> ReadItem:  # noqa: ARG002
        rate = processor.sampling_rate
        check_samples(item, rate, most=processor.longest)
        made, (text,) = processor.processor._process_audio([item], **processor.settings)
        rows = text.count(token)
        if not rows:
            raise InvalidRequest(f"the audio has {len(item)} samples, too few for one embedding; give more")
        taken = {name: value for name, value in made.items() if name not in self.options and name != "num_audio_tokens"}
        return ReadItem(
            payload={**taken, _ROWS: torch.tensor(rows)},
            text=text,
            embeddings=rows,
            notes={self.duration: f"{len(item) / rate:.2f}"} if self.duration else {},
        )


def check_samples(samples: np.ndarray[Any, Any], rate: int, *, least: int = 1, most: int | None = None) -> None:
    """Raises `InvalidRequest` unless there are ``least`` to ``most`` samples, at ``rate`` Hz; ``None``: any number."""
    if not least <= len(samples) <= (len(samples) if most is None else most):
        bound = "or more" if most is None else f"to {most} ({most / rate:g} seconds)"
        raise InvalidRequest(
            f"the audio has {len(samples)} samples; allowed: {least} {bound}, float32 at {rate} Hz. Cut longer audio "
            "into windows, and write a placeholder for each"
        )


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Joins the parts along their first dimension. The last dimension is padded with zeros to the longest."""
    longest = max(part.shape[-1] for part in parts)
    return torch.cat([nn.functional.pad(part, (0, longest - part.shape[-1])) for part in parts])
