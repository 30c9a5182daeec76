"""The model types that the engine opens, as the table in docs/features.md."""

from __future__ import annotations

from collections.abc import Iterable

from ..architectures.crossed_family import crossed_model_types
from ..architectures.families import family_media
from ..architectures.frame_family import frame_model_types
from ..native.crossed_decoder import MODEL_TYPES as CROSSED_TYPES
from ..native.decoders import MODEL_TYPES as DECODER_TYPES
from ..native.encoders import MODEL_TYPES as ENCODER_TYPES
from ..native.speech_encoders import MODEL_TYPES as SPEECH_ENCODERS
from ..native.towers import MODEL_TYPES as TOWER_TYPES
from ..speech.names import MODEL_TYPES as SPEECH_TYPES

TRIED = frozenset(
    {
        *("afmoe", "apertus", "arcee", "bitnet", "cohere2_moe", "cohere_compass_text", "flex_olmo", "hunyuan_v1_dense"),
        *("hunyuan_v1_moe", "hy_v3", "jais2", "kolibri1", "laguna", "minimax_m3_vl_text", "modernbert-decoder"),
        *("axk1", "flint", "longcat_flash", "nanochat", "phimoe"),
    }
)
"""Decoders that torch computes, of those that tests try. Others may open as well: a comparison decides."""

TRIED_ENCODERS = frozenset({"albert", "embedding_gemma2_text", "jina_embeddings_v3", "ultrabert"})
"""Encoders of texts that torch computes, as `TRIED`."""

_ALL, _NOTHING, _ENCODER = "all", "nothing: torch does", "the encoder, and known decoders"
_DECODER = "known decoders; torch the encoder"


def table_of_opened() -> str:
    """Returns the table in Markdown: what a model reads and writes, its model types, and what the native library
    computes of it."""
    crossed, frames = {"whisper", *crossed_model_types()}, {*frame_model_types()}
    rows: list[tuple[str, str, Iterable[str], str]] = [
        ("text", "text", DECODER_TYPES, _ALL),
        ("text", "text", TRIED, _NOTHING),
        ("text", "text of an encoder-decoder", (crossed & CROSSED_TYPES) - SPEECH_TYPES, _ALL),
        ("text", "vectors, classes", ENCODER_TYPES, _ALL),
        ("text", "vectors, classes", TRIED_ENCODERS, _NOTHING),
    ]
    for medium in ("image", "audio"):
        of_medium = {kind for kind, reads in family_media().items() if reads == medium}
        rows.append((f"{medium}, text", "text", of_medium & TOWER_TYPES, _ENCODER))
        rows.append((f"{medium}, text", "text", of_medium - TOWER_TYPES, _DECODER))
    rows += [
        ("audio", "text of an encoder-decoder", crossed & SPEECH_TYPES, _ALL),
        ("audio", "text of a CTC model or transducer", frames & SPEECH_ENCODERS, _ALL),
        ("audio", "text of a CTC model or transducer", frames - SPEECH_ENCODERS, _NOTHING),
        ("audio", "who speaks when", {"nemotron3_diarization"}, _NOTHING),
    ]
    lines = ["| reads | writes | `model_type` | the native library computes |", "|---|---|---|---|"]
    for reads, writes, kinds, computed in rows:
        if named := ", ".join(f"`{kind}`" for kind in sorted(kinds)):
            lines.append(f"| {reads} | {writes} | {named} | {computed} |")
    return "\n".join(lines) + "\n"
