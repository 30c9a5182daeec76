"""Measure the demo checkpoint: `python demo/training/evaluate.py` prints the table of demo/README.md (markdown).

Everything heard here is held out of training in all three respects at once: voices, speeds and sentences. Decoding is
transformers' own `generate`, greedy, on whole 30 s windows, with the float16 weights loaded as float32.
"""

import argparse
import difflib
import random
import re
from dataclasses import dataclass
from pathlib import Path

import jiwer
import numpy as np
import torch
from grammar import LANGUAGES
from speech import RATE, WINDOW, Clip, Store, Window, compose, noise, quiet
from transformers import WhisperForConditionalGeneration, WhisperProcessor

DEMO = Path(__file__).resolve().parents[1]
TOLERANCE = 0.2
"""Seconds by which a segment's end may be off."""
SURE = 0.6
"""The no-speech probability from which a window counts as silent."""


@dataclass
class Recogniser:
    """A checkpoint with its processor."""

    model: WhisperForConditionalGeneration
    processor: WhisperProcessor

    @classmethod
    def load(cls, folder: Path) -> "Recogniser":
        model = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        return cls(model, WhisperProcessor.from_pretrained(folder))

    def features(self, audios: list[np.ndarray]) -> torch.Tensor:
        """(B, 80, 3000) of windows."""
        return self.processor(audios, sampling_rate=RATE, return_tensors="pt").input_features

    def texts(self, audios: list[np.ndarray], batch: int = 16, **options: object) -> list[str]:
        """The text of each window."""
        out = []
        for i in range(0, len(audios), batch):
            tokens = self.model.generate(self.features(audios[i : i + batch]), **options)
            out += self.processor.batch_decode(tokens, skip_special_tokens=True)
        return out

    def segments(self, audios: list[np.ndarray], batch: int = 8, **options: object) -> list[list[tuple[float, str]]]:
        """The end (s) and text of each window's segments."""
        out = []
        for i in range(0, len(audios), batch):
            made = self.model.generate(
                self.features(audios[i : i + batch]), return_timestamps=True, return_segments=True, **options
            )
            out += [[(float(s["end"]), self.text(s["tokens"])) for s in row] for row in made["segments"]]
        return out

    def long(self, audio: np.ndarray, **options: object) -> str:
        """The text of a recording of any length, cut at the model's own timestamps."""
        inputs = self.processor(
            audio,
            sampling_rate=RATE,
            return_tensors="pt",
            truncation=False,
            padding="longest",
            return_attention_mask=True,
        )
        tokens = self.model.generate(**inputs, return_timestamps=True, **options)
        return self.text(tokens[0])

    def text(self, tokens: torch.Tensor) -> str:
        return self.processor.decode(tokens, skip_special_tokens=True)

    @torch.inference_mode()
    def first(self, audios: list[np.ndarray], batch: int = 16) -> torch.Tensor:
        """(B, V) probabilities after <|startoftranscript|>."""
        start, out = self.model.generation_config.decoder_start_token_id, []
        for i in range(0, len(audios), batch):
            features = self.features(audios[i : i + batch])
            logits = self.model(features, decoder_input_ids=torch.full((len(features), 1), start)).logits
            out.append(logits[:, 0].softmax(-1))
        return torch.cat(out)

    def token(self, name: str) -> int:
        return self.processor.tokenizer.convert_tokens_to_ids(f"<|{name}|>")


def plain(text: str) -> str:
    """Lower-cased, without punctuation, single spaces."""
    return " ".join(re.sub(r"[^\w\s]", " ", text.lower()).split())


def error_rate(truth: list[str], heard: list[str]) -> float:
    """Word error rate of normalised texts."""
    return jiwer.wer([plain(t) for t in truth], [plain(h) for h in heard])


def end_errors(truth: list[tuple[float, str]], heard: list[tuple[float, str]]) -> list[float]:
    """How far (s) the end of each true segment is off: matched by order if the counts agree, else by equal texts in
    order; a segment without a match is off by infinity."""
    if len(truth) == len(heard):
        return [abs(t - h) for (t, _), (h, _) in zip(truth, heard, strict=True)]
    errors = [float("inf")] * len(truth)
    matcher = difflib.SequenceMatcher(None, [plain(t) for _, t in truth], [plain(h) for _, h in heard], autojunk=False)
    for block in matcher.get_matching_blocks():
        for k in range(block.size):
            errors[block.a + k] = abs(truth[block.a + k][0] - heard[block.b + k][0])
    return errors


def several(store: Store, language: str, count: int, shortest: float, longest: float, seed: int) -> list[Window]:
    """`count` recordings of many sentences by one voice each, between the two lengths (s), pauses 0.2 to 1.5 s."""
    rng = random.Random(f"{seed}-{language}")
    by_voice: dict[str, list[int]] = {}
    for i, clip in enumerate(store.clips):
        if clip.language == language:
            by_voice.setdefault(clip.voice, []).append(i)
    windows = []
    for _ in range(count):
        indices, limit = by_voice[rng.choice(sorted(by_voice))], rng.uniform(shortest, longest)
        parts: list[tuple[np.ndarray, Clip]] = []
        gaps: list[float] = []
        while True:
            index = rng.choice(indices)
            parts.append((store.audio(index), store.clips[index]))
            gaps.append(rng.uniform(0.2, 1.5) if gaps else rng.uniform(0, 0.5))
            if sum(gaps) + sum(len(a) for a, _ in parts) / RATE > limit:
                break
        if len(parts) > 1:
            parts, gaps = parts[:-1], gaps[:-1]
        windows.append(compose(parts, gaps, 0.3, limit=600.0))
    return windows


def silences(count: int, seed: int) -> list[np.ndarray]:
    """Digital silence and noises, of any length up to a window."""
    rng = np.random.default_rng((seed, 77))
    return [quiet(rng, float(rng.uniform(1, WINDOW))).audio for _ in range(count)]


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def single_rows(recogniser: Recogniser, store: Store, count: int) -> list[tuple[str, ...]]:
    """One row per language of single sentences: transcribe (clean, noisy), translate, language."""
    rows, right, total = [], 0, 0
    for language in LANGUAGES:
        indices = [i for i, c in enumerate(store.clips) if c.language == language][:count]
        audios, clips = [store.audio(i) for i in indices], [store.clips[i] for i in indices]
        rng = np.random.default_rng(5)
        noisy = [a + noise(rng, len(a)) * np.sqrt(np.mean(a**2)) * 10 ** (-15 / 20) for a in audios]
        first = recogniser.first(audios)
        codes = [recogniser.token(code) for code in LANGUAGES]
        hits = int((first[:, codes].argmax(1) == LANGUAGES.index(language)).sum())
        right, total = right + hits, total + len(clips)
        said, meant = [c.text for c in clips], [c.translation for c in clips]
        rows.append(
            (
                language,
                str(len(clips)),
                percent(error_rate(said, recogniser.texts(audios, task="transcribe"))),
                percent(error_rate(said, recogniser.texts(audios, task="transcribe", return_timestamps=True))),
                percent(error_rate(said, recogniser.texts(noisy, task="transcribe"))),
                percent(error_rate(meant, recogniser.texts(audios, task="translate"))),
                percent(hits / len(clips)),
                percent(float((first[:, recogniser.token("nospeech")] > SURE).float().mean())),
            )
        )
    return [*rows, ("all", str(total), "", "", "", "", percent(right / total), "")]


def window_rows(recogniser: Recogniser, store: Store, count: int) -> list[tuple[str, ...]]:
    """One row per language of whole windows of many sentences: WER with timestamps and without, ends, translation."""
    rows = []
    for language in LANGUAGES:
        windows = several(store, language, count, 10, 28.5, seed=3)
        audios = [w.audio for w in windows]
        heard = recogniser.segments(audios, language=language, task="transcribe")
        said = [" ".join(s.text for s in w.segments) for w in windows]
        meant = [" ".join(s.translation for s in w.segments) for w in windows]
        errors = [
            e
            for w, h in zip(windows, heard, strict=True)
            for e in end_errors([(s.stop, s.text) for s in w.segments], h)
        ]
        rows.append(
            (
                language,
                f"{count} ({len(errors)})",
                percent(error_rate(said, [" ".join(t for _, t in h) for h in heard])),
                percent(error_rate(said, recogniser.texts(audios, language=language, task="transcribe"))),
                percent(
                    error_rate(
                        meant, recogniser.texts(audios, language=language, task="translate", return_timestamps=True)
                    )
                ),
                percent(float(np.mean([e <= TOLERANCE for e in errors]))),
                f"{np.median(errors):.2f} s",
            )
        )
    return rows


def long_rows(recogniser: Recogniser, store: Store, count: int) -> list[tuple[str, ...]]:
    """One row per language of recordings of 60 to 90 s."""
    rows = []
    for language in LANGUAGES:
        recordings = several(store, language, count, 60, 90, seed=4)
        rates = [
            error_rate(
                [" ".join(getattr(s, field) for s in r.segments) for r in recordings],
                [recogniser.long(r.audio, language=language, task=task) for r in recordings],
            )
            for task, field in (("transcribe", "text"), ("translate", "translation"))
        ]
        rows.append((language, str(count), *map(percent, rates)))
    return rows


def silence_row(recogniser: Recogniser, count: int) -> tuple[str, ...]:
    """Silence and noise: how often it is known as such, and how often it yields no text."""
    audios = silences(count, seed=9)
    sure = float((recogniser.first(audios)[:, recogniser.token("nospeech")] > SURE).float().mean())
    empty = [
        np.mean(
            [not plain(t) for t in recogniser.texts(audios, language="en", task="transcribe", return_timestamps=stamps)]
        )
        for stamps in (False, True)
    ]
    return (str(count), percent(sure), percent(float(empty[0])), percent(float(empty[1])))


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A markdown table."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=DEMO / "checkpoint")
    parser.add_argument("--work", type=Path, default=Path("build/demo"), help="where the clips are kept")
    parser.add_argument("--clips", type=int, default=1800, help="held-out clips to speak")
    parser.add_argument("--singles", type=int, default=300, help="single sentences per language")
    parser.add_argument("--windows", type=int, default=50, help="windows of many sentences per language")
    parser.add_argument("--recordings", type=int, default=6, help="recordings of 60 to 90 s per language")
    parser.add_argument("--silences", type=int, default=200)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    recogniser = Recogniser.load(args.checkpoint)
    store = Store.make(args.work / "held", 1, args.clips, held=True)
    if args.singles:
        print(
            table(
                (
                    "single sentences",
                    "clips",
                    "WER transcribe",
                    "with timestamps",
                    "at 15 dB SNR",
                    "WER translate",
                    "language right",
                    f"P(no speech) > {SURE}",
                ),
                single_rows(recogniser, store, args.singles),
            ),
            flush=True,
        )
    if args.windows:
        print(
            table(
                (
                    "windows of 10-28 s",
                    "windows (segments)",
                    "WER with timestamps",
                    "WER without",
                    "WER translate",
                    f"ends within {TOLERANCE} s",
                    "median",
                ),
                window_rows(recogniser, store, args.windows),
            ),
            flush=True,
        )
    if args.recordings:
        print(
            table(
                ("recordings of 60-90 s", "recordings", "WER transcribe", "WER translate"),
                long_rows(recogniser, store, args.recordings),
            ),
            flush=True,
        )
    if args.silences:
        print(
            table(
                ("silence and noise", f"P(no speech) > {SURE}", "no text", "no text, with timestamps"),
                [silence_row(recogniser, args.silences)],
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
