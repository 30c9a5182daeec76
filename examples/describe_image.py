"""Several questions about one image, asked at once: the image is encoded once.

    python examples/describe_image.py MODEL IMAGE [QUESTION...]

MODEL is the folder or hub id of a vision-language checkpoint with a chat template: Qwen2-VL, Qwen2.5-VL,
Qwen3-VL, Gemma 3, LLaVA, Idefics3 or SmolVLM.
"""

import sys

import trio

import triolet

QUESTIONS = ["Describe the image.", "Which colours does it have?", "Is anybody in it?"]


async def ask(engine: triolet.Engine, image: str, question: str) -> None:
    """The image stands before the question, where the chat template puts it."""
    content = [{"type": "image", "image": image}, {"type": "text", "text": question}]
    sampling = triolet.SamplingParams(max_tokens=128)
    completion = await engine.generate(messages=[{"role": "user", "content": content}], sampling=sampling)
    print(f"{question}\n  {completion.text!r}")


async def main(model: str, image: str, questions: list[str]) -> None:
    """A task for each question: what their prompts share is computed once as well."""
    async with triolet.Engine(model) as engine:
        async with trio.open_nursery() as nursery:
            for question in questions:
                nursery.start_soon(ask, engine, image, question)
        cache = engine.statistics().encoder_cache
    print(f"images encoded: {cache.encoded}")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("usage: describe_image.py MODEL IMAGE [QUESTION...]")
    try:
        trio.run(main, sys.argv[1], sys.argv[2], sys.argv[3:] or QUESTIONS)
    except* triolet.TrioletError as errors:
        sys.exit(str(errors.exceptions[0]))
