"""The gain of draft tokens, for chats and for texts that repeat: ``python benchmarks/drafts.py FOLDER``, a decoder's.

Each prompt is answered alone, with draft tokens and without, in turns. The ratio of a prompt is that of its shortest
times; both answers must be the same tokens.
"""

from __future__ import annotations

import argparse
import time
from statistics import geometric_mean

import trio
from claims import Claims

from triolet import Engine, EngineConfig, SamplingParams

CHATS = (
    "Why is the sky blue?",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "What should I pack for a week of hiking in autumn?",
    "Explain to a child how a bicycle stays upright.",
    "Give me three ideas for a birthday present for my father.",
    "What is the difference between a virus and a bacterium?",
    "Write a polite email that asks a landlord to repair the heating.",
    "How do I cook rice without it sticking?",
    "Who was Marie Curie, and what did she discover?",
    "Tell me about the history of the bicycle.",
)
_TEXT = "The quick brown fox jumps over the lazy dog, and the dog, who was asleep, does not even lift its head to look."
REPEATING = (
    f"Repeat this text word by word: {_TEXT}",
    "Write the numbers from one to thirty as digits, each on a line of its own, beginning with 1.",
    f"Copy the following sentence three times, each on a line of its own: {_TEXT}",
)


async def measure(folder: str, prompts: tuple[str, ...], rounds: int, tokens: int) -> list[float]:
    """Returns the ratio of the times with and without draft tokens, for each prompt."""
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    shortest: dict[tuple[str, bool], float] = {}
    written: dict[str, tuple[int, ...]] = {}
    async with (
        Engine(folder, config=EngineConfig(dtype="float32")) as with_drafts,
        Engine(folder, config=EngineConfig(dtype="float32", speculation=None)) as without,
    ):
        for turn in range(rounds + 1):  # the first is not counted: it fills the prefix cache of both
            for prompt in prompts:
                for drafts in (bool(turn % 2), not turn % 2):
                    begun = time.perf_counter()
                    answer = await (with_drafts if drafts else without).generate(
                        messages=[{"role": "user", "content": prompt}], sampling=sampling
                    )
                    took = time.perf_counter() - begun
                    assert written.setdefault(prompt, answer.token_ids) == answer.token_ids, prompt
                    if turn:
                        shortest[prompt, drafts] = min(took, shortest.get((prompt, drafts), took))
    return [shortest[prompt, True] / shortest[prompt, False] for prompt in prompts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48)
    given, claim = parser.parse_args(), Claims()
    for what, prompts, most in (("ordinary chats", CHATS, 1.01), ("texts that repeat", REPEATING, 1.0)):
        ratios = trio.run(measure, given.folder, prompts, given.rounds, given.tokens)
        mean, each = geometric_mean(ratios), ", ".join(f"{ratio:.2f}" for ratio in ratios)
        claim(mean <= most, f"{len(ratios)} {what} take {mean:.3f} of the time without draft tokens ({each})")
    claim.exit()


if __name__ == "__main__":
    main()
