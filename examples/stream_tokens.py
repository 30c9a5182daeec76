"""Shows a text growing token by token, with Whisper's own prompt tokens instead of `Engine.transcribe`.

    python examples/stream_tokens.py [MODEL]

MODEL is a Whisper checkpoint, by default that of the demo. `Engine.stream` takes one window of audio, 30 s for Whisper.
Leaving its block early would withdraw the request.
"""

import sys

import trio

import triolet
from triolet import demo


async def main(model: str) -> None:
    """Streams a recording of the demo that fits into one window."""
    sample = next(sample for sample in demo.samples() if sample.text and sample.duration <= 30)
    prompt = f"<|startoftranscript|><|{sample.language}|><|transcribe|><|notimestamps|>"
    tokens = 0
    async with triolet.Engine(model) as engine:
        async with engine.stream(prompt, audio=sample.path) as deltas:
            async for delta in deltas:
                print(delta.text, end="", flush=True)
                tokens += len(delta.token_ids)
        memory = engine.statistics().device
    print(f"\n{tokens} tokens; the engine held {memory.total / 2**20:.1f} MiB on {memory.device}")


if __name__ == "__main__":
    trio.run(main, sys.argv[1] if sys.argv[1:] else str(demo.checkpoint()))
