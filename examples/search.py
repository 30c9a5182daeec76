"""Searches texts in two passes: embeddings find the nearest, a reranker reads each of these beside the query.

    python examples/search.py EMBEDDER RERANKER QUERY < texts

EMBEDDER and RERANKER are folders or hub ids of an embedding model and of a sequence classifier with one label. Each
line of standard input is a text. The texts' embeddings could be kept; only the query's changes.
"""

import sys

import numpy as np
import trio

import triolet

NEAREST = 5  # texts that the reranker reads: it costs more than a product of vectors


async def search(embedder: triolet.Engine, reranker: triolet.Engine, query: str, texts: list[str]) -> None:
    """Two engines live in one program, each with a device of its own if it likes."""
    vectors = await embedder.embed([query, *texts], normalize=True)
    nearness = vectors[1:] @ vectors[0]  # cosines, since each vector has length 1
    nearest = [texts[index] for index in np.argsort(-nearness)[:NEAREST]]
    scores = await reranker.score(query, nearest)
    for score, text in sorted(zip(scores, nearest, strict=True), reverse=True):
        print(f"{score:7.3f}  {text}")


async def main(embedder: str, reranker: str, query: str, texts: list[str]) -> None:
    """Both engines end with the block, in reverse order."""
    async with triolet.Engine(embedder) as first, triolet.Engine(reranker) as second:
        await search(first, second, query, texts)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: search.py EMBEDDER RERANKER QUERY < texts")
    lines = [line.strip() for line in sys.stdin if line.strip()]
    try:
        trio.run(main, *sys.argv[1:], lines)
    except* triolet.TrioletError as errors:
        sys.exit(str(errors.exceptions[0]))
