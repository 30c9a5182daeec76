"""Train the demo checkpoint from nothing but espeak-ng: `python demo/training/train.py --work build/demo`.

The clips are spoken once (about two minutes); the windows are composed and augmented anew in every step, from a
generator seeded with (seed, step), so that a stopped run resumes as if it had not been stopped. Shapes: B windows,
M mel frames of 10 ms, T = M / 2 encoder positions of 20 ms, N tokens, D model width, V tokens in the vocabulary.
"""

import argparse
import collections
import itertools
import json
import math
import os
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from grammar import LANGUAGES, corpus
from speech import RATE, TICK, WINDOW, Segment, Store, Window, augment, compose, quiet, stretch
from tokenizers import AddedToken
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperTokenizer,
)

DEMO = Path(__file__).resolve().parents[1]
STAMPS = round(WINDOW / TICK) + 1
MERGES = 256
# <|earlier|> stands where Whisper has <|startofprev|>. Decoders give up to 223 tokens of text behind that one; four
# sentences at most are trained here, and more spoil the answer, so the checkpoint does not claim the name.
SPECIAL = (
    "<|endoftext|>",
    "<|startoftranscript|>",
    *(f"<|{code}|>" for code in LANGUAGES),
    "<|translate|>",
    "<|transcribe|>",
    "<|startoflm|>",
    "<|earlier|>",
    "<|nospeech|>",
    "<|notimestamps|>",
)
EARLY = 0.35
"""The share of the steps that is spent on single sentences, in the main, until the decoder has learned to listen."""
GUIDED = 2
"""How many heads of the decoder's last layer are taught to look where a token is heard."""
BLUR = torch.tensor([0.05, 0.1, 0.2, 0.3, 0.2, 0.1, 0.05])
"""How a timestamp's target spreads over its neighbours, 20 ms apart."""


# ---------------------------------------------------------------------------------------------------- tokenizer


def byte_alphabet() -> dict[int, str]:
    """GPT-2's printable character for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(rest)}


def join_pair(parts: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    """The parts with every occurrence of the pair merged, from the left."""
    out: list[str] = []
    i = 0
    while i < len(parts):
        step = 2 if parts[i : i + 2] == pair else 1
        out.append("".join(parts[i : i + step]))
        i += step
    return tuple(out)


def learn_merges(lines: tuple[str, ...], count: int) -> list[tuple[str, str]]:
    """Byte pairs to merge: first a space with whatever byte starts a word (so that a text never begins with a bare
    space, which decoders suppress there), then the most frequent ones."""
    alphabet = byte_alphabet()
    words = collections.Counter(
        tuple(alphabet[b] for b in f" {piece}".encode())
        for line in lines
        for word in line.split()
        for piece in (word.rstrip(".,?:!"),)
    )
    merges = sorted({word[:2] for word in words})
    for pair in merges:
        words = collections.Counter({join_pair(word, pair): n for word, n in words.items()})
    while len(merges) < count:
        pairs = collections.Counter()
        for word, n in words.items():
            for pair in itertools.pairwise(word):
                pairs[pair] += n
        best = max(pairs.items(), key=lambda item: (item[1], item[0]))[0]
        merges.append(best)
        words = collections.Counter({join_pair(word, best): n for word, n in words.items()})
    return merges


@cache
def make_tokenizer() -> WhisperTokenizer:
    """Bytes, merges, special tokens, timestamps: in Whisper's order."""
    merges = learn_merges(corpus(), MERGES)
    spelled = [*byte_alphabet().values(), *("".join(pair) for pair in merges)]
    tokenizer = WhisperTokenizer(vocab={token: i for i, token in enumerate(dict.fromkeys(spelled))}, merges=merges)
    tokenizer.add_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIAL], special_tokens=True)
    tokenizer.add_tokens([AddedToken(f"<|{i * TICK:.2f}|>", normalized=False) for i in range(STAMPS)])
    return tokenizer


@cache
def ids(token: str) -> int:
    """The id of a special token, written without its '<|' and '|>'."""
    return make_tokenizer().convert_tokens_to_ids(f"<|{token}|>")


@cache
def encode(text: str) -> tuple[int, ...]:
    """The tokens of a text, with the leading space of Whisper."""
    return tuple(make_tokenizer()(f" {text}", add_special_tokens=False).input_ids)


def stamp(seconds: float) -> int:
    """The timestamp token nearest to a time."""
    return ids("0.00") + min(max(round(seconds / TICK), 0), STAMPS - 1)


# ---------------------------------------------------------------------------------------------------- targets


@dataclass
class Target:
    """What the decoder reads and shall answer: `answers[i]` after `reads[: i + 1]`, -100 where nothing is learned;
    `spans[i]` is when (s) what is answered there is heard, (-1, -1) for what is not heard; `spoken` are the bytes of
    the transcript for the CTC head and `until` the seconds that they fill."""

    reads: list[int]
    answers: list[int]
    spans: list[tuple[float, float]]
    spoken: list[int]
    until: float


Timed = list[tuple[int, tuple[float, float]]]
"""Tokens with the span (s) in which they are heard."""
UNHEARD = (-1.0, -1.0)


@cache
def sounds(text: str) -> tuple[int, ...]:
    """What the CTC head shall spell: the bytes of a space and the lower-cased words (a byte is nearly a sound, which
    the encoder learns far sooner than tokens)."""
    words = re.sub(r"[^\w\s]", " ", text.lower()).split()
    return tuple("".join(f" {word}" for word in words).encode())


def timed(segment: Segment, translate: bool) -> Timed:
    """The tokens of a segment's text: a translation is heard all over the segment, a transcript in step with it."""
    if translate:
        return [(token, (segment.start, segment.stop)) for token in encode(segment.translation)]
    tokens = encode(segment.text)
    lengths = np.array([len(make_tokenizer().convert_ids_to_tokens(token)) for token in tokens])
    middles = segment.start + (np.cumsum(lengths) - lengths / 2) / lengths.sum() * (segment.stop - segment.start)
    return [(token, (float(m) - 0.35, float(m) + 0.35)) for token, m in zip(tokens, middles, strict=True)]


def content(window: Window, translate: bool, timestamps: bool, shift: float) -> Timed:
    """What follows the prompt. A sentence that the window cuts off leaves its opening timestamp alone."""
    out: Timed = []
    for segment in window.segments:
        cut = segment.stop > WINDOW - shift + 1e-6
        begin = (stamp(segment.start + shift), (segment.start - 0.2, segment.start + 0.4))
        end = (stamp(segment.stop + shift), (segment.stop - 0.4, segment.stop + 0.2))
        text = [] if cut else timed(segment, translate)
        out += [begin, *text, *([] if cut else [end])] if timestamps else text
    if timestamps and not window.segments:
        out = [(stamp(0), UNHEARD)]
    return [*out, (ids("endoftext"), UNHEARD)]


def misread(rng: np.random.Generator, told: list[int]) -> list[int]:
    """What the decoder is told to have said: in every second window a tenth of its words' tokens are others, so that
    it must listen instead of guessing from what it said, and finds its way back after an error."""
    if rng.random() < 0.5:
        return told
    words = ids("endoftext")  # special tokens and timestamps come after the words'
    return [int(rng.integers(words)) if t < words and rng.random() < 0.1 else t for t in told]


def target(rng: np.random.Generator, window: Window, earlier: str | None, shift: float) -> Target:
    """A random task on a window: transcribe or translate, with timestamps or without, sometimes after earlier text;
    `shift` is the time (s) at which the window's audio is said to begin."""
    translate = rng.random() < (0.25 if window.language == "en" else 0.45)
    timestamps = rng.random() < 0.65
    prompt = [ids("startoftranscript"), ids(window.language), ids("translate" if translate else "transcribe")]
    prompt += [] if timestamps else [ids("notimestamps")]
    before = [ids("earlier"), *encode(earlier)] if earlier else []
    told, spans = map(list, zip(*content(window, translate, timestamps, shift), strict=True))
    first = ids(window.language) if window.segments else ids("nospeech")
    reads = [*before, *prompt, *misread(rng, told[:-1])]
    answers = [-100] * len(before) + [first] + [-100] * (len(prompt) - 2) + told
    late = timestamps and window.segments and window.segments[0].start + shift > 1
    if late and rng.random() < 0.5:  # decoders allow no later first timestamp than this
        reads[len(before) + len(prompt)] = stamp(1.0)
    whole = [s for s in window.segments if s.stop <= WINDOW - shift + 1e-6]
    cut = [s for s in window.segments if s.stop > WINDOW - shift + 1e-6]
    return Target(
        reads,
        answers,
        [UNHEARD] * (len(answers) - len(spans)) + spans,
        [byte for s in whole for byte in sounds(s.text)],
        cut[0].start if cut else window.seconds,
    )


# ---------------------------------------------------------------------------------------------------- batches


@dataclass
class Batch:
    """audio (B, samples) float32; reads, answers (B, N) int64; spans (B, N, 2) in encoder positions; spoken (sum of
    lengths,) with lengths and filled encoder positions (B,); `shift` in encoder positions."""

    audio: torch.Tensor
    reads: torch.Tensor
    answers: torch.Tensor
    spans: torch.Tensor
    spoken: torch.Tensor
    lengths: torch.Tensor
    filled: torch.Tensor
    shift: int


class Composer:
    """Makes the batch of a step out of the store."""

    def __init__(self, store: Store, seed: int, steps: int) -> None:
        self.store, self.seed, self.steps = store, seed, steps
        self.seconds = np.array([c.stop - c.start for c in store.clips]) / RATE
        self.by_language = [
            np.array([i for i, c in enumerate(store.clips) if c.language == code]) for code in LANGUAGES
        ]

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        """Clips of one language, any voices."""
        return list(rng.choice(self.by_language[rng.integers(3)], count))

    def like(self, rng: np.random.Generator, count: int, size: int) -> list[list[int]]:
        """`size` draws of `count` clips whose lengths are alike."""
        draws = sorted((self.draw(rng, count) for _ in range(5 * size)), key=lambda d: self.seconds[d].sum())
        at = rng.integers(0, len(draws) - size + 1)
        return draws[at : at + size]

    def window(self, rng: np.random.Generator, draw: list[int], limit: float, late: bool) -> Window:
        """The clips of a draw with pauses, at a random speed; `late`: speech may begin seconds into the window."""
        parts = []
        factor = rng.uniform(0.9, 1.12)
        for index in draw:
            factor = rng.uniform(0.9, 1.12) if rng.random() < 0.3 else factor
            parts.append(
                (stretch(self.store.audio(index), factor) * 10 ** (rng.uniform(-5, 5) / 20), self.store.clips[index])
            )
        gaps = [float(rng.uniform(0.15, 1.5) if rng.random() < 0.9 else rng.uniform(1.5, 4)) for _ in draw]
        gaps[0] = float(rng.choice((0.0, rng.uniform(0, 0.6), rng.uniform(0, 4.0 if late else 1.0)), p=(0.3, 0.4, 0.3)))
        return compose(parts, gaps, float(rng.uniform(0, 0.4)), limit)

    def draws(self, rng: np.random.Generator, progress: float) -> tuple[str, list[list[int]]]:
        """The kind of a step's batch and its windows' clips: single sentences at first, whole windows at last."""
        kinds = ("short", "several", "whole", "padded")
        shares = (
            (0.9, 0.1, 0, 0)
            if progress < EARLY
            else (0.4, 0.35, 0.15, 0.1)
            if progress < 0.75
            else (0.3, 0.35, 0.22, 0.13)
        )
        kind = str(rng.choice(kinds, p=shares))
        if kind == "short":
            return kind, self.like(rng, 1, 24)
        if kind == "several":
            count = int(rng.integers(2, 8))
            return kind, self.like(rng, count, max(4, round(24 / count)))
        if kind == "whole":
            return kind, [self.draw(rng, 16) for _ in range(3)]
        return kind, [self.draw(rng, int(rng.choice((1, 1, 2, 3, 5)))) for _ in range(4)]

    def batch(self, step: int) -> Batch:
        """The batch of a step, the same whenever it is asked for."""
        rng = np.random.default_rng((self.seed, step))
        progress = step / self.steps
        kind, draws = self.draws(rng, progress)
        windows = []
        for draw in draws:
            window = self.window(rng, draw, WINDOW, late=kind in ("whole", "padded"))
            if rng.random() < {"short": 0.05, "several": 0.04, "whole": 0.04, "padded": 0.15}[kind]:
                shortest = window.seconds if rng.random() < 0.5 else 0.5
                window = quiet(rng, min(float(rng.uniform(shortest, window.seconds + 0.5)), WINDOW))
            elif rng.random() < 0.5:
                window.audio = augment(rng, window.audio)
            windows.append(window)
        longest = max(window.seconds for window in windows)
        length = WINDOW if kind in ("whole", "padded") else min(longest + rng.uniform(0, 1), WINDOW)
        positions = min(math.ceil(length / TICK), STAMPS - 1)
        shifted = kind in ("short", "several") and progress >= EARLY and rng.random() < 0.4
        shift = int(rng.integers(0, STAMPS - positions)) if shifted else 0
        targets = [target(rng, w, self.earlier(rng, d), shift * TICK) for w, d in zip(windows, draws, strict=True)]
        return collate(windows, targets, positions, shift)

    def earlier(self, rng: np.random.Generator, draw: list[int]) -> str | None:
        """Now and then, text that was said before the window."""
        if rng.random() > 0.08:
            return None
        language = LANGUAGES.index(self.store.clips[draw[0]].language)
        some = rng.choice(self.by_language[language], rng.integers(1, 5))
        return " ".join(self.store.clips[i].text for i in some)


def pad(rows: list[list[int]], value: int) -> torch.Tensor:
    """(B, longest) int64."""
    longest = max(map(len, rows))
    return torch.tensor([row + [value] * (longest - len(row)) for row in rows])


def pad_spans(rows: list[list[tuple[float, float]]]) -> torch.Tensor:
    """(B, longest, 2) float32, in encoder positions; below 0 where nothing is heard."""
    longest = max(map(len, rows))
    return torch.tensor([row + [UNHEARD] * (longest - len(row)) for row in rows]) / TICK


def collate(windows: list[Window], targets: list[Target], positions: int, shift: int) -> Batch:
    """A batch of windows padded with silence to `positions` encoder positions."""
    audio = np.zeros((len(windows), round(positions * TICK * RATE)), np.float32)
    for row, window in zip(audio, windows, strict=True):
        row[: len(window.audio)] = window.audio[: len(row)]
    return Batch(
        torch.from_numpy(audio),
        pad([t.reads for t in targets], ids("endoftext")),
        pad([t.answers for t in targets], -100),
        pad_spans([t.spans for t in targets]),
        torch.tensor([x for t in targets for x in t.spoken]),
        torch.tensor([len(t.spoken) for t in targets]),
        torch.tensor([max(1, min(positions, math.floor(t.until / TICK))) for t in targets]),
        shift,
    )


# ---------------------------------------------------------------------------------------------------- model


@cache
def mel_filters() -> torch.Tensor:
    """(201, 80) filters of Whisper."""
    return torch.tensor(WhisperFeatureExtractor().mel_filters, dtype=torch.float32)


def log_mel(audio: torch.Tensor) -> torch.Tensor:
    """Whisper's features of audio (B, samples) as if it were padded to 30 s, for its own length only: (B, 80, M)."""
    end = 200 if audio.shape[1] < round(WINDOW * RATE) else 0
    padded = F.pad(F.pad(audio, (0, end)), (200, 200 - end), mode="reflect")
    spectrum = torch.stft(padded, 400, 160, window=torch.hann_window(400), center=False, return_complex=True)
    power = spectrum[..., : audio.shape[1] // 160].abs() ** 2
    mel = (mel_filters().T @ power).clamp(min=1e-10).log10()
    return (mel.maximum(mel.amax((1, 2), keepdim=True) - 8) + 4) / 4


def mask_bands(mel: torch.Tensor, step: int) -> torch.Tensor:
    """The features with a band of at most 9 mels blanked, in two steps of five."""
    if step % 5 < 3:
        return mel
    rng = np.random.default_rng((step, 5))
    low, width = int(rng.integers(0, 72)), int(rng.integers(2, 10))
    mel = mel.clone()
    mel[:, low : low + width] = mel.amin((1, 2), keepdim=True)
    return mel


def make_model(width: int, encoder: int, decoder: int) -> WhisperForConditionalGeneration:
    """An untrained model of Whisper's layout with the demo's tokenizer."""
    tokens = make_tokenizer()
    end = ids("endoftext")
    return WhisperForConditionalGeneration(
        WhisperConfig(
            d_model=width,
            encoder_layers=encoder,
            decoder_layers=decoder,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=4 * width,
            decoder_ffn_dim=4 * width,
            num_mel_bins=80,
            vocab_size=len(tokens),
            bos_token_id=end,
            eos_token_id=end,
            pad_token_id=end,
            dropout=0.0,
            decoder_start_token_id=ids("startoftranscript"),
            suppress_tokens=None,
            begin_suppress_tokens=None,
        )
    )


def generation_config(decoder_layers: int) -> GenerationConfig:
    """The decoding rules of Whisper. Only the bare space is suppressed at the beginning: an empty answer is what
    the model is taught for silence, so the end of the text is allowed there."""
    never = [
        ids(name)
        for name in (
            "startoftranscript",
            *LANGUAGES,
            "translate",
            "transcribe",
            "startoflm",
            "earlier",
            "nospeech",
            "notimestamps",
        )
    ]
    end = ids("endoftext")
    return GenerationConfig(
        decoder_start_token_id=ids("startoftranscript"),
        eos_token_id=end,
        pad_token_id=end,
        bos_token_id=end,
        is_multilingual=True,
        lang_to_id={f"<|{code}|>": ids(code) for code in LANGUAGES},
        task_to_id={name: ids(name) for name in ("transcribe", "translate")},
        no_timestamps_token_id=ids("notimestamps"),
        max_length=448,
        max_initial_timestamp_index=50,
        begin_suppress_tokens=[make_tokenizer().convert_tokens_to_ids("Ġ")],
        suppress_tokens=sorted(never),
        return_timestamps=False,
        alignment_heads=[[decoder_layers - 1, head] for head in range(GUIDED)],
    )


class Learner(torch.nn.Module):
    """The model with what only training needs: a CTC head on the encoder, and a linear map that gives the timestamps
    embeddings made of sinusoids, so that what is learned of one holds for its neighbours."""

    def __init__(self, model: WhisperForConditionalGeneration, bf16: bool = False) -> None:
        super().__init__()
        self.model, self.bf16 = model, bf16
        width = model.config.d_model
        self.ctc = torch.nn.Linear(width, 256)
        waves = torch.cat([model.model.encoder.embed_positions.weight.detach(), torch.zeros(1, width)])
        waves[-1] = waves[-2]
        self.heard: dict[str, torch.Tensor] = {}
        model.model.decoder.layers[-1].encoder_attn.register_forward_pre_hook(self.listen, with_kwargs=True)
        self.register_buffer("waves", waves, persistent=False)
        self.stamps = torch.nn.Linear(width, width, bias=False)
        with torch.no_grad():
            self.stamps.weight.copy_(torch.eye(width) * 0.03)
            model.model.decoder.embed_tokens.weight[ids("0.00") :] = 0

    def embeddings(self) -> torch.Tensor:
        """(V, D) of all tokens."""
        weight = self.model.model.decoder.embed_tokens.weight
        return torch.cat([weight[: ids("0.00")], weight[ids("0.00") :] + self.stamps(self.waves)])

    def encode(self, mel: torch.Tensor, shift: int) -> torch.Tensor:
        """(B, 80, M) -> (B, T, D): Whisper's encoder on a window that begins at position `shift`."""
        encoder = self.model.model.encoder
        hidden = F.gelu(encoder.conv2(F.gelu(encoder.conv1(mel)))).transpose(1, 2)
        hidden = hidden + encoder.embed_positions.weight[shift : shift + hidden.shape[1]]
        for layer in encoder.layers:
            hidden = layer(hidden, None)
            hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        return encoder.layer_norm(hidden)

    def listen(self, _: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        """Keep what the last layer's cross attention is asked, (B, N, D)."""
        self.heard["asked"] = args[0] if args else kwargs["hidden_states"]

    def attention_loss(self, states: torch.Tensor, spans: torch.Tensor) -> torch.Tensor:
        """How far the first GUIDED heads of the last cross attention look away from where a token is heard."""
        attention = self.model.model.decoder.layers[-1].encoder_attn
        size = attention.head_dim

        def heads(x: torch.Tensor) -> torch.Tensor:
            return x[..., : GUIDED * size].unflatten(-1, (GUIDED, size)).transpose(1, 2)

        asked, keys = attention.q_proj(self.heard.pop("asked").float()), attention.k_proj(states.float())
        logp = (heads(asked) @ heads(keys).mT * size**-0.5).log_softmax(-1)
        at = torch.arange(states.shape[1])
        inside = (at >= spans[..., :1]) & (at <= spans[..., 1:]) & (spans[..., 1:] >= 0)
        found = logp.masked_fill(~inside[:, None], -1e4).logsumexp(-1)
        found = found[inside.any(-1)[:, None].expand_as(found)]
        return -found.mean() if len(found) else found.sum()

    def forward(self, batch: Batch, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The mean loss of the tokens, of the CTC head, and of the guided attention."""
        mel = mask_bands(log_mel(batch.audio), step)
        table = self.embeddings()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            states = self.encode(mel, batch.shift)
            hidden = self.model.model.decoder(
                inputs_embeds=F.embedding(batch.reads, table), encoder_hidden_states=states, use_cache=False
            ).last_hidden_state
        learned = batch.answers >= 0
        logp = F.log_softmax(hidden[learned].float() @ table.T, -1)
        answers = batch.answers[learned]
        loss = token_loss(logp, answers)
        guided = self.attention_loss(states, batch.spans)
        if not len(batch.spoken):
            return loss, loss.new_zeros(()), guided
        frames = F.log_softmax(self.ctc(states.float()), -1).transpose(0, 1)
        ctc = F.ctc_loss(
            frames, batch.spoken, batch.filled, batch.lengths, blank=0, reduction="none", zero_infinity=True
        )
        return loss, ctc.sum() / batch.lengths.sum(), guided

    def exported(self) -> WhisperForConditionalGeneration:
        """A copy of the model whose timestamp embeddings are plain rows, in float16."""
        model = WhisperForConditionalGeneration(self.model.config)
        model.load_state_dict(self.model.state_dict())
        with torch.no_grad():
            model.model.decoder.embed_tokens.weight.copy_(self.embeddings())
        model.generation_config = generation_config(model.config.decoder_layers)
        return model.half()


def token_loss(logp: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """Cross entropy of log-probabilities (K, V); a timestamp's neighbours share in its probability."""
    first = ids("0.00")
    is_stamp = answers >= first
    plain = -logp[~is_stamp].gather(1, answers[~is_stamp, None])
    near = (answers[is_stamp, None] + torch.arange(-3, 4)).clamp(first, first + STAMPS - 1)
    blurred = -(logp[is_stamp].gather(1, near) * BLUR).sum(1)
    return (plain.sum() + blurred.sum()) / len(answers)


# ---------------------------------------------------------------------------------------------------- training


def write_checkpoint(learner: Learner, folder: Path) -> None:
    """Write model, tokenizer and feature extractor beside `folder`, then put them in its place."""
    fresh = folder.with_name(folder.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    model = learner.exported()
    model.save_pretrained(fresh)
    make_tokenizer().save_pretrained(fresh)
    WhisperFeatureExtractor().save_pretrained(fresh)
    old = folder.with_name(folder.name + ".old")
    if folder.exists():
        os.replace(folder, old)
    os.replace(fresh, folder)
    shutil.rmtree(old, ignore_errors=True)


def learning_rate(step: int, steps: int, peak: float, warmup: int = 300) -> float:
    """Linear warm-up, then half a cosine down to a fiftieth of the peak."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))))


def orthogonal(g: torch.Tensor) -> torch.Tensor:
    """Matrices (K, R, C), R <= C, with their singular values brought near 1 by five Newton-Schulz steps."""
    x = g / (g.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (2.0315 * (a @ a) - 4.7750 * a) @ x
    return x


class Muon(torch.optim.Optimizer):
    """Momentum whose steps are made orthogonal (Jordan et al., 2024), matrices of one shape together, in float32:
    on a CPU and at this width several times as fast as torch's own. A step's root mean square is 0.4 of the rate."""

    def __init__(self, params: list[torch.nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:
        """Change the parameters by their gradients."""
        for group in self.param_groups:
            alike: dict[tuple[int, int], list[tuple[torch.nn.Parameter, torch.Tensor]]] = {}
            for p in group["params"]:
                kept = self.state[p].setdefault("momentum", torch.zeros_like(p))
                kept.lerp_(p.grad, 1 - group["momentum"])
                wide = p.grad.lerp(kept, group["momentum"])
                wide = wide if p.shape[0] <= p.shape[1] else wide.T
                alike.setdefault(tuple(wide.shape), []).append((p, wide))
            for shape, pairs in alike.items():
                updates = orthogonal(torch.stack([wide for _, wide in pairs])) * (0.4 * math.sqrt(shape[1]))
                for (p, _), update in zip(pairs, updates, strict=True):
                    p.mul_(1 - 0.01 * group["lr"]).sub_(
                        update.reshape(shape) if p.shape == shape else update.T, alpha=group["lr"]
                    )


def make_optimizers(learner: Learner, peak: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for all else; one learning rate does for both."""
    hidden = [p for name, p in learner.named_parameters() if ".layers." in name and p.ndim == 2]
    taken = set(map(id, hidden))
    rest = [p for p in learner.parameters() if id(p) not in taken and p.requires_grad]
    return [torch.optim.AdamW(rest, lr=peak, betas=(0.9, 0.98), weight_decay=0.01), Muon(hidden, lr=peak)]


def ctc_weight(step: int, steps: int) -> float:
    """The weight of the CTC loss: more of it at first, until the encoder has found the sounds."""
    return 1.0 if step < 0.85 * steps else 0.3


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("build/demo"), help="clips and training state")
    parser.add_argument("--out", type=Path, default=DEMO / "checkpoint")
    parser.add_argument("--steps", type=int, default=9000)
    parser.add_argument("--clips", type=int, default=15_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peak", type=float, default=1.5e-3, help="highest learning rate")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--encoder-layers", type=int, default=3)
    parser.add_argument("--decoder-layers", type=int, default=3)
    parser.add_argument("--save-every", type=int, default=250, help="steps between two saved states")
    parser.add_argument("--stop-after", type=int, help="stop at this step, with the schedule of --steps")
    parser.add_argument("--bf16", action="store_true", help="matrix products in bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def train(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    store = Store.make(args.work / "train", args.seed, args.clips, held=False)
    composer = Composer(store, args.seed, args.steps)
    learner = Learner(make_model(args.width, args.encoder_layers, args.decoder_layers), args.bf16)
    optimizers = make_optimizers(learner, args.peak)
    state, begin = args.work / "state.pt", 0
    if state.exists():
        saved = torch.load(state, weights_only=True)
        learner.load_state_dict(saved["learner"])
        for optimizer, kept in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
        begin = saved["step"]
    print(f"{sum(p.numel() for p in learner.model.parameters()) / 1e6:.2f} M parameters, from step {begin}", flush=True)
    end, clock, means = args.stop_after or args.steps, time.perf_counter(), collections.Counter()
    with ThreadPoolExecutor(1) as pool:
        ahead = collections.deque(pool.submit(composer.batch, s) for s in range(begin, min(begin + 3, end)))
        for step in range(begin, end):
            if step + 3 < end:
                ahead.append(pool.submit(composer.batch, step + 3))
            batch = ahead.popleft().result()
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(step, args.steps, args.peak)
            loss, ctc, guided = learner(batch, step)
            (loss + ctc_weight(step, args.steps) * ctc + 0.3 * guided).backward()
            torch.nn.utils.clip_grad_norm_(learner.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            means += collections.Counter(
                loss=loss.item(), ctc=ctc.item(), guided=guided.item(), seconds=batch.audio.numel() / RATE
            )
            if (step + 1) % 25 == 0:
                took = time.perf_counter() - clock
                print(
                    json.dumps(
                        {
                            "step": step + 1,
                            "loss": round(means["loss"] / 25, 3),
                            "ctc": round(means["ctc"] / 25, 3),
                            "guided": round(means["guided"] / 25, 3),
                            "audio_s": round(means["seconds"] / 25),
                            "s_per_step": round(took / 25, 3),
                        }
                    ),
                    flush=True,
                )
                clock, means = time.perf_counter(), collections.Counter()
            if (step + 1) % args.save_every == 0 or step + 1 == end:
                saved = {
                    "learner": learner.state_dict(),
                    "step": step + 1,
                    "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                }
                torch.save(saved, state.with_suffix(".new"))
                os.replace(state.with_suffix(".new"), state)
                write_checkpoint(learner, args.out)


if __name__ == "__main__":
    train(parse())
