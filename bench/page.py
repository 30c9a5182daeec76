"""The page of a card, from its figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_COLUMNS = {
    "speech": (
        ("errors", "word error rate, default options", "{:.2f} %"),
        ("greedy_errors", "word error rate, greedy", "{:.2f} %"),
        ("unlike", "words unlike transformers', greedy", "{:.2f} %"),
        ("factor", "real-time factor, one clip, default options", "{:.3f}"),
        ("greedy_factor", "one clip, greedy", "{:.3f}"),
        ("together_factor", "8 clips at once, greedy", "{:.3f}"),
        ("first_token", "first token, greedy, s", "{:.2f}"),
    ),
    "text": (
        ("perplexity", "perplexity", "{:.3f}"),
        ("same", "likeliest token as transformers'", "{:.2%}"),
        ("divergence", "Kullback-Leibler divergence", "{:.2g}"),
        ("alone", "tokens a second, one text", "{:.0f}"),
        ("together", "8 texts at once", "{:.0f}"),
        ("prompt", "tokens of a prompt a second", "{:.0f}"),
    ),
    "vectors": (
        ("least_cosine", "least cosine with transformers' vectors", "{:.6f}"),
        ("cosine", "mean cosine", "{:.6f}"),
        ("nearest", "nearest text as by transformers' vectors", "{:.2%}"),
        ("texts", "texts a second, 64 in one call", "{:.0f}"),
        ("query", "a query of 12 words, s", "{:.4f}"),
    ),
}
"""The figures of each kind, with their heads and how they are written."""
_USE = {
    "speech": ("transcribe talk.mp3 --model {}", 'print((await engine.transcribe("talk.mp3")).text)'),
    "text": ('generate {} "Why is the sky blue?"', 'print((await engine.generate("Why is the sky blue?")).text)'),
    "vectors": ('embed {} "a cat on the mat"', 'vectors = await engine.embed(["a cat on the mat", "a dog"])'),
}


def page(kept: Mapping[str, Any], name: str, about: str, notes: Sequence[str], command: str) -> str:
    """Returns the card as Markdown. ``about`` is a text on the model, ``command`` what made the card."""
    command_line, call = _USE[kept["kind"]]
    source = f"[{name}](https://huggingface.co/{name})" if name.count("/") == 1 else name
    refused = [f"{row} is refused: {each['refused']}" for row, each in kept["rows"].items() if "refused" in each]
    parts = (
        f"# {name}",
        about,
        _table(("", ""), [("source", source), *kept["facts"].items()]),
        f"```\ntriolet {command_line.format(name)}\ntriolet serve {name}\n```",
        f'```py\nasync with triolet.Engine("{name}") as engine:\n    {call}\n```',
        "## What each format costs",
        _costs(kept),
        "\n".join(f"- {line}" for line in (*refused, *notes)),
        "## How it was measured",
        _table(("", ""), [("inputs", kept["inputs"]), *kept["runs"].items()]),
        f"```\n{command}\n```",
    )
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def _costs(kept: Mapping[str, Any]) -> str:
    """The table of the formats, with the columns that have figures."""
    known = (("size", "file, MB", "{}"), ("held", "weights in memory, MB", "{:.1f}"), *_COLUMNS[kept["kind"]])
    rows = {
        name: {**row, **row.get("accuracy", {}), **row.get("speed", {})}
        for name, row in kept["rows"].items()
        if row and "refused" not in row
    }
    shown = [one for one in (*known, ("open", "open, s", "{:.2f}")) if any(one[0] in row for row in rows.values())]
    found = []
    for name, row in rows.items():
        figures = [(row.get(figure), form) for figure, _, form in shown]
        found.append((name, *("" if value is None else form.format(value) for value, form in figures)))
    return _table(("format", *(head for _, head, _ in shown)), found)
