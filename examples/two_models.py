"""Two models in one program: recordings become text, and a text model answers each. What both hold is bounded.

    python examples/two_models.py MODEL MEBIBYTES [FILE...]

MODEL is the folder or hub id of a checkpoint with a chat template, MEBIBYTES is for both models together. Where it
holds only one of them they take turns: all recordings that wait are transcribed, then what was heard is answered.
Without files it takes the recordings that come along with the demo checkpoint.
"""

import sys
from pathlib import Path

import trio

import triolet
from triolet import EngineConfig, Engines, ModelSpec, demo

SPEECH = EngineConfig(max_running=8, encoder_cache_bytes=32 * 2**20)
CHAT = EngineConfig(max_running=8, max_positions=512)


async def answer(engines: Engines, path: Path) -> None:
    """Each model is loaded by whoever comes first, and stays while it is used."""
    async with engines.use("speech") as engine:
        transcript = await engine.transcribe(path)
    async with engines.use("chat") as engine:
        question = [{"role": "user", "content": transcript.text}]
        completion = await engine.generate(messages=question, max_tokens=30)
    print(f"{path.name}: {transcript.text!r}: {completion.text!r}")


async def main(model: str, mebibytes: int, paths: list[Path]) -> None:
    """The nursery of the tasks is inside the block of the engines."""
    models = {"speech": ModelSpec(demo.checkpoint(), config=SPEECH), "chat": ModelSpec(model, config=CHAT)}
    async with Engines(models, memory_budget=mebibytes * 2**20, idle_seconds=60) as engines:
        async with trio.open_nursery() as nursery:
            for path in paths:
                nursery.start_soon(answer, engines, path)
        for name, found in engines.statistics().items():
            print(f"{name}: {found.state.value}, loaded {found.loads} times", file=sys.stderr)


if __name__ == "__main__":
    if len(sys.argv) < 3 or not sys.argv[2].isdigit():
        sys.exit("usage: two_models.py MODEL MEBIBYTES [FILE...]")
    files = [Path(name) for name in sys.argv[3:]] or [sample.path for sample in demo.samples()]
    try:
        trio.run(main, sys.argv[1], int(sys.argv[2]), files)
    except* triolet.TrioletError as errors:
        sys.exit("; ".join(str(error) for error in errors.exceptions))
