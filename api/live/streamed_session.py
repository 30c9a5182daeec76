"""`StreamReader`: reads live audio with a model that hears on where it was."""

from __future__ import annotations

from functools import partial

import numpy as np
from attrs import define, evolve, field

from ...core.speech import Sound, StreamingModel, is_unspaced
from ..inputs.audio import Samples
from ..inputs.threads import run_in_thread
from ..speech.reader import WindowReader, aligned_frames, frames_of_steps
from ..speech.recipe import Context
from ..speech.words import TextWord, split_words, unfinished
from .agreement import TimedWord, timed
from .endpoints import Reading
from .reader import Heard


@define(eq=False)
class StreamReader:
    """Reads one utterance after the other, piece by piece. A word is stable when the next one begins, since nothing
    that was written changes.

    Each piece changes the state only after its last await.

    Attributes:
        language: the code of the language that the caller named or the model wrote last; ``None`` before it has.
    """

    reader: WindowReader
    model: StreamingModel
    language: str | None = field(init=False)
    _samples: Samples = field(factory=partial(np.zeros, 0, np.float32), init=False)  # of the utterance so far
    _start: int = field(default=0, init=False)  # of the utterance
    _sound: Sound | None = field(default=None, init=False)  # the piece heard last
    _frames: int = field(default=0, init=False)  # of all pieces
    _written: tuple[int, ...] = field(default=(), init=False)  # the tokens of all pieces
    _open: list[tuple[int, tuple[int, int], float]] = field(factory=list, init=False)
    """The tokens whose words are not stable, each with its frames and its log-probability."""
    _is_long: bool = field(default=False, init=False)  # half of the most tokens, which frames do not bound, is written
    _begun: bool = field(default=False, init=False)  # a word of the utterance is stable

    @language.default
    def _named(self) -> str | None:
        return self.reader.recipe.language

    @property
    def provisional(self) -> str:
        """The text of the utterance after its stable part."""
        text = self.model.decode([token for token, _, _ in self._open])
        return text if self._begun else _led(text)

    async def read(self, reading: Reading, samples: Samples) -> Heard:
        """Reads ``samples``, the audio of ``reading``. Returns the changes."""
        self._samples, self._start = samples, reading.start
        ends = reading.full or self._is_long
        while await self._hear_on(last=ends):
            pass
        return Heard(stable=self._take(ends=ends), moved=reading.stop if ends else None)

    async def end(self) -> Heard:
        """Ends the utterance. Returns the rest of its words, which are stable now."""
        while await self._hear_on(last=True):
            pass
        return Heard(stable=self._take(ends=True))

    async def _hear_on(self, *, last: bool) -> bool:
        """Reads the next piece. Returns false if there is none."""
        recipe = self.reader.recipe
        hear = partial(self.model.hear_on, self._samples, self._sound, recipe.language, last=last)
        sound = await run_in_thread(hear)
        if sound is None:
            return False
        draft = self.model.draft_on(sound, self._written)
        (answer,) = await self.reader.ask([recipe.request(self.reader.new_id("piece"), draft)], is_text=True)
        ask = recipe.ask(Context(name="", language=recipe.language))
        self.language = recipe.language or self.model.cut(answer.token_ids, ask).language or self.language
        first = recipe.facts.first_step
        if first is None:
            later = tuple((start + self._frames, stop + self._frames) for start, stop in answer.frames)
        else:
            later = frames_of_steps(first + len(self._written), len(answer.token_ids))
        self._open += list(zip(answer.token_ids, later, answer.logprobs, strict=False))
        self._written += answer.token_ids
        self._is_long = first is None and 2 * len(self._written) > recipe.facts.most_tokens
        self._frames += sound.item.embeddings
        self._sound = sound
        return True

    def _take(self, *, ends: bool) -> tuple[TimedWord, ...]:
        """Returns the words that are stable now: all but those that may go on, or all if the utterance ``ends``. Then
        all that is known of the utterance is dropped."""
        recipe, rules = self.reader.recipe, self.reader.recipe.word_rules(self.language)
        self._open = [one for one in self._open if self.model.is_text(one[0])]
        placed, words = tuple[TimedWord, ...](), list[TextWord]()
        if self._open:
            tokens = [token for token, _, _ in self._open]
            words = split_words(tokens, self.model.decode, self.language)
            words = words[: len(words) - (0 if ends else unfinished(words))]
            if words and not self._begun:
                words[0] = evolve(words[0], text=_led(words[0].text))
            self._begun = self._begun or bool(words)
            last = min(self._frames, max(len(self._samples) // recipe.facts.step_samples, 1))
            aligned = aligned_frames([(frames, logprob) for _, frames, logprob in self._open], last)
            placed = timed(words, aligned, rules=rules, offset=recipe.seconds(self._start))
        del self._open[: sum(len(word.token_ids) for word in words)]
        if ends:
            self._samples, self._sound, self._frames, self._written = self._samples[:0], None, 0, ()
            self._is_long = self._begun = False
        return placed


def _led(text: str) -> str:
    """Returns the first text of an utterance, after a blank unless it has one or its script has none."""
    return f" {text}" if text[:1].strip() and not is_unspaced(text[0]) else text
