"""`UtteranceReader`: turns the readings of a live session into words, stable and provisional."""

from __future__ import annotations

import math

from attrs import define, evolve, field, frozen

from ...core.speech import Sound
from ..inputs.audio import Samples
from ..outputs.results import Word
from ..speech.reader import WindowReader, aligned_by_frames
from ..speech.recipe import Context, History
from ..speech.windows import Attempt
from ..speech.words import TextWord, ending_by, split_text, split_words
from .agreement import Agreement, TimedWord, after, agreed, cut, joined, said_again, spread, text_of, timed
from .endpoints import Reading

_LEAST_HEARD = 2.0  # seconds of speech that are enough to detect its language
_EDGE = 1.0  # seconds: words that end this near to the end of a full window may be cut off


@frozen(kw_only=True)
class Heard:
    """The changes by one reading: the words that are stable now, and ``moved``. Audio before sample ``moved`` is not
    needed any more; ``None``: all audio is still needed.
    """

    stable: tuple[TimedWord, ...] = ()
    moved: int | None = None

    @property
    def words(self) -> tuple[Word, ...]:
        """The stable words, with the marks that belong to them."""
        return joined(self.stable)


@frozen(kw_only=True)
class _Spoken:
    """The words of a hypothesis. The first ``again`` of ``whole`` are the stable ones, said again."""

    language: str | None
    whole: tuple[TextWord, ...] = ()
    again: int = 0

    @property
    def words(self) -> tuple[TextWord, ...]:
        """The words after the stable ones."""
        return self.whole[self.again :]


@define(eq=False)
class UtteranceReader:
    """Reads one utterance after the other, each as often as `read` is called.

    A reading changes the state only after its last await.

    Args:
        interim: reads an utterance that goes on, greedily and once.
        thorough: reads an utterance at a pause, with all options.

    Attributes:
        language: the language of the latest reading; ``None`` before the first one.
    """

    interim: WindowReader
    thorough: WindowReader
    history: History = field(init=False)
    language: str | None = field(init=False)
    _agreement: Agreement = field(factory=Agreement, init=False)
    _timed: tuple[TimedWord, ...] = field(default=(), init=False)  # stable and provisional, if times are known
    _decided: bool = field(init=False)  # the language is decided
    _temperature: float = field(default=0.0, init=False)  # of the latest text
    _latest: tuple[int, str] | None = field(default=None, init=False)
    """The start and the item of the latest reading, if the encoder can go on from there."""

    def __attrs_post_init__(self) -> None:
        recipe = self.thorough.recipe
        self.history = recipe.history()
        self.language = recipe.language
        self._decided = recipe.language is not None

    @property
    def provisional(self) -> str:
        """The text of the utterance after its stable part."""
        return text_of(self._agreement.provisional)

    async def read(self, reading: Reading, samples: Samples) -> Heard:
        """Reads ``samples``, the audio of ``reading``. Returns the changes."""
        final = reading.pauses or reading.full
        sound = await self.thorough.sound(samples)
        if self._latest is not None and self._latest[0] == reading.start:
            sound = evolve(sound, item=evolve(sound.item, follows=self._latest[1]))
        language, decided = await self._language_of(reading, sound)
        attempt = await self._attempt(reading, sound, language)
        facts, rate = self.thorough.recipe.facts, self.thorough.recipe.description.sampling_rate
        self._latest = (reading.start, sound.item.key) if facts.reuses and len(samples) >= rate else None
        spoken = self._spoken(attempt, final=final)
        if spoken is None or not (decided or final):
            self.language = language
            self._agreement.provisional = self._agreement.provisional if spoken is None else spoken.words
            return Heard()
        placed: tuple[TimedWord, ...] = ()
        if final or agreed(self._agreement.provisional, spoken.words):
            placed = await self._placed(reading, attempt, spoken)
        self.language, self._decided = spoken.language or self.language, decided
        self._temperature = attempt.assessment.temperature
        return self._heard(reading, spoken.words, placed)

    async def end(self) -> Heard:
        """Ends the utterance. Returns the rest of its words, which are stable now."""
        known = len(self._agreement.stable)
        self._agreement.settle()
        rest = self._timed[known:]
        self._leave(len(self._agreement.stable))
        if self.thorough.recipe.options.multilingual:
            self._decided = self.thorough.recipe.language is not None
        return Heard(stable=rest)

    # -- the engine ----------------------------------------------------------------------------------------------------

    async def _language_of(self, reading: Reading, sound: Sound) -> tuple[str | None, bool]:
        """Returns the language to read in, and whether it is decided. It is decided if the model is certain of it after
        enough speech, or at a pause. No text becomes stable before it is decided. A model that finds the language while
        it reads finds it in each reading.
        """
        if not self.thorough.probes:
            return self.thorough.recipe.language, True
        if self.language is not None and (self._decided or self._agreement.stable):
            return self.language, self._decided
        found = await self.thorough.languages(sound)
        language = max(found, key=found.__getitem__)
        is_enough = reading.pauses or self.thorough.recipe.seconds(reading.stop - reading.start) >= _LEAST_HEARD
        return language, is_enough and found[language] >= self.thorough.recipe.options.language_detection_threshold

    async def _attempt(self, reading: Reading, sound: Sound, language: str | None) -> Attempt:
        begins, stable = self.thorough.recipe.facts.begins, self._agreement.stable
        begun = tuple(token for word in stable for token in word.token_ids) if begins else ()
        reader, name = (self.thorough, "text") if reading.pauses or reading.full else (self.interim, "interim")
        before = self.history.last(taken=len(begun), language=language)
        return await reader.read(sound, Context(name=name, language=language, before=before, begun=begun))

    async def _placed(self, reading: Reading, attempt: Attempt, spoken: _Spoken) -> tuple[TimedWord, ...]:
        """Returns all words of the utterance's audio with their times, none of which is later than the audio."""
        end = self.thorough.recipe.seconds(reading.stop)
        placed = await self._timed_words(reading, attempt, spoken)
        return tuple(evolve(one, word=ending_by(one.word, end)) for one in placed)

    async def _timed_words(self, reading: Reading, attempt: Attempt, spoken: _Spoken) -> tuple[TimedWord, ...]:
        recipe, stable = self.thorough.recipe, self._agreement.stable
        start, known = recipe.seconds(reading.start), self._timed[: len(stable)]
        if recipe.facts.word_times is None:
            begin, probability = known[-1].word.end if known else start, math.exp(attempt.assessment.avg_logprob)
            end = max(recipe.seconds(reading.stop), begin)
            return after(known, spread(spoken.words, begin, end, probability))
        words = (*stable, *spoken.words) if recipe.facts.begins else spoken.whole
        if attempt.generated.frames:
            aligned = aligned_by_frames(attempt, recipe)
        else:
            tokens = recipe.model.word_tokens(tuple(token for word in words for token in word.token_ids), attempt.ask)
            aligned = await self.thorough.aligned("words", tokens, attempt.sound)
        if aligned is None:
            return ()
        placed = timed(words, aligned, rules=recipe.word_rules(spoken.language), offset=start)
        return placed if recipe.facts.begins else after(known, placed[spoken.again :])

    # -- decisions -----------------------------------------------------------------------------------------------------

    def _spoken(self, attempt: Attempt, *, final: bool) -> _Spoken | None:
        """Returns the words of the hypothesis, or ``None`` if it is not good enough to count."""
        recipe, language = self.thorough.recipe, attempt.ask.language
        if attempt.assessment.is_silent(recipe.options):
            return _Spoken(language=language)
        if not (final or attempt.assessment.is_good(recipe.options)):
            return None
        written = attempt.generated.token_ids
        found = recipe.model.cut(written, attempt.ask)
        language = language or found.language
        if recipe.facts.begins or recipe.facts.word_times is not None:
            tokens = [token for token in written if recipe.model.is_text(token)]
            whole = tuple(split_words(tokens, recipe.model.decode, language))
        else:
            whole = tuple(split_text("".join(map(recipe.text_of, found.spans))))
        again = 0 if recipe.facts.begins else said_again(self._agreement.stable, whole)
        return _Spoken(language=language, whole=whole, again=again)

    def _heard(self, reading: Reading, words: tuple[TextWord, ...], placed: tuple[TimedWord, ...]) -> Heard:
        known = len(self._agreement.stable)
        count = len(self._agreement.hear(words, goes_on=not (reading.pauses or reading.full)))
        keeps = self.thorough.recipe.facts.begins and self.thorough.recipe.facts.word_times is not None
        self._timed = placed if placed or keeps else self._timed[:known]
        if reading.full:
            sure = self.thorough.recipe.seconds(reading.stop) - _EDGE
            rest = placed[known + count :]
            count += len(self._agreement.settle(sum(one.word.end <= sure for one in rest)))
        moved = self._moved(reading)
        if moved is None and (reading.full or self._written > self._most_begun):
            # there is no place to cut, as in one endless word: all words become stable and leave
            count += len(self._agreement.settle())
            self._leave(len(self._agreement.stable))
            moved = reading.stop
        return Heard(stable=placed[known : known + count], moved=moved)

    def _moved(self, reading: Reading) -> int | None:
        """Moves stable words of a long utterance into the history. Returns the sample at which the audio is cut, or
        ``None`` if no words were moved."""
        recipe, stable = self.thorough.recipe, self._agreement.stable
        is_long = 2 * (reading.stop - reading.start) > recipe.facts.window_samples
        is_wordy = 2 * self._written > recipe.facts.most_tokens
        if recipe.facts.word_times is None or not (self._timed and (reading.full or is_long or is_wordy)):
            return None
        found = cut(self._timed, len(stable), self.thorough.recipe.seconds(reading.start))
        if found is None:
            return None
        count, seconds = found
        self._leave(count)
        return min(max(round(seconds * recipe.description.sampling_rate), reading.start + 1), reading.stop)

    @property
    def _most_begun(self) -> int:
        """The most tokens with which a reading begins, so that the hotwords have their room before them."""
        half = self.thorough.recipe.facts.most_tokens
        return max(half - len(self.history.always), half // 2)

    @property
    def _written(self) -> int:
        """The number of tokens in the stable words, if the next reading begins with them."""
        if not self.thorough.recipe.facts.begins:
            return 0
        return sum(len(word.token_ids) for word in self._agreement.stable)

    def _leave(self, count: int) -> None:
        """Moves the first ``count`` stable words into the history."""
        left = self._agreement.forget(count)
        self._timed = self._timed[count:]
        self.history.add([token for word in left for token in word.token_ids], self._temperature, self.language)
