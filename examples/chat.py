"""A conversation in the terminal: a line in, the answer as it comes.

    python examples/chat.py MODEL [MAX_TOKENS]

MODEL is the folder or hub id of a checkpoint with a chat template, MAX_TOKENS the most of one answer. Each turn sends
the whole conversation; what was said before is not computed again, since its keys and values are kept (prefix caching).
^C ends the program after the device has been given back; so does the end of the input.
"""

import sys

import trio

import triolet


async def answer(engine: triolet.Engine, messages: list[dict[str, str]], max_tokens: int) -> str:
    """Shows the answer as it comes; returns all of it."""
    sampling = triolet.SamplingParams(max_tokens=max_tokens, temperature=0.7, top_p=0.9, seed=len(messages))
    parts = []
    async with engine.stream(messages=messages, sampling=sampling) as deltas:
        async for delta in deltas:
            print(delta.text, end="", flush=True)
            parts.append(delta.text)
    print()
    return "".join(parts)


async def main(model: str, max_tokens: int) -> None:
    """One user, so one request at a time."""
    messages: list[dict[str, str]] = []
    async with triolet.Engine(model, config=triolet.EngineConfig(max_running=1)) as engine:
        print("> ", end="", file=sys.stderr, flush=True)
        while line := await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
            messages.append({"role": "user", "content": line.strip()})
            messages.append({"role": "assistant", "content": await answer(engine, messages, max_tokens)})
            print("> ", end="", file=sys.stderr, flush=True)
        requests = engine.statistics().requests
    computed = requests.tokens_fed - requests.tokens_drafted
    print(f"{computed} tokens computed, {requests.tokens_cached} found computed", file=sys.stderr)


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 3:
        sys.exit("usage: chat.py MODEL [MAX_TOKENS]")
    try:
        trio.run(main, sys.argv[1], int(sys.argv[2]) if sys.argv[2:] else 256)
    except* KeyboardInterrupt:
        sys.exit(130)
    except* triolet.TrioletError as errors:
        sys.exit(str(errors.exceptions[0]))
