"""The decoder's heads that show when words are spoken, as generation_config.json of a Whisper checkpoint names them."""

from __future__ import annotations

from typing import Any

from attrs import frozen

from .settings import FileSettings

_FILTER_WIDTH = 7  # transformers' default, used if neither file has a width


@frozen(kw_only=True)
class AlignmentSettings:
    """The settings for the alignment of words. ``fault`` says why words cannot be aligned; ``None``: they can."""

    heads: tuple[tuple[int, int], ...]  # (layer, head) of the decoder
    filter_width: int  # width of the median filter in frames, odd
    fault: str | None = None

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers with alignment heads, ascending."""
        return tuple(sorted({layer for layer, _ in self.heads}))

    def heads_of(self, layer: int) -> list[int]:
        """The alignment heads of ``layer``."""
        return [head for found, head in self.heads if found == layer]

    @classmethod
    def read(
        cls, generation: FileSettings | None, config: FileSettings, *, layers: int, heads: int
    ) -> AlignmentSettings:
        """Reads the settings for a decoder of ``layers`` layers with ``heads`` heads each.

        If generation_config.json has no ``alignment_heads``, all heads of the upper half of the layers are taken, as in
        openai/whisper. A checkpoint with wrong settings is not refused, since it can still transcribe.
        """
        written = None if generation is None else generation.get("alignment_heads")
        width, source = _filter_width(generation, config)
        if isinstance(width, bool) or not isinstance(width, int) or width < 1 or width % 2 == 0:
            return cls(
                heads=(),
                filter_width=1,
                fault=f"{source.path} has median_filter_width={width!r}; allowed: odd, as in 7",
            )
        if written is None:
            upper = range(layers // 2, layers)
            return cls(heads=tuple((layer, head) for layer in upper for head in range(heads)), filter_width=width)
        if fault := _fault(written, layers, heads):
            path = None if generation is None else generation.path
            return cls(heads=(), filter_width=width, fault=f"{path} has alignment_heads={written!r:.200}; {fault}")
        return cls(heads=tuple(dict.fromkeys((layer, head) for layer, head in written)), filter_width=width)


def _filter_width(generation: FileSettings | None, config: FileSettings) -> tuple[Any, FileSettings]:
    """Returns the width as it is written, and the file that has it."""
    if generation is not None and generation.get("median_filter_width") is not None:
        return generation.get("median_filter_width"), generation
    width = config.get("median_filter_width")
    return (_FILTER_WIDTH if width is None else width), config


def _fault(written: Any, layers: int, heads: int) -> str | None:
    """The reason why ``written`` is not a list of heads of the decoder; ``None``: it is."""
    allowed = f"allowed: pairs of [layer, head], layers 0 to {layers - 1} and heads 0 to {heads - 1} of its decoder"
    if not isinstance(written, list) or not written:
        return allowed
    for pair in written:
        if (
            not isinstance(pair, list)
            or len(pair) != 2
            or not all(type(one) is int and 0 <= one < most for one, most in zip(pair, (layers, heads), strict=True))
        ):
            return f"{pair!r:.50} is not one of them; {allowed}"
    return None
