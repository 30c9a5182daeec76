"""Attention whose queries, keys and values are made of latent ones (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1): each
row has one short vector, of which one matrix makes the keys and values of all heads, and one part of a key with rotary
positions, which all heads share. Keys and values go into the pages as attention reads them.
"""

from __future__ import annotations

from typing import Any

from attrs import frozen

from .library import Ending
from .parts import norm_of
from .program import MULTIPLE, Normed, Program
from .recurrent import Rooms


def query_name(attention: Any) -> str:
    """Returns the name of the linear layer that makes queries."""
    return "q_b_proj" if getattr(attention, "q_proj", None) is None else "q_proj"


def other_names(attention: Any) -> tuple[str, ...]:
    """Returns the names of the other linear layers, but for that of the outputs."""
    before = ("q_a_proj",) if query_name(attention) == "q_b_proj" else ()
    return (*before, "kv_a_proj_with_mqa", "kv_b_proj")


def unknown_latent(attention: Any) -> str | None:
    """Returns the reason why the library cannot compute the attention; ``None``: it can."""
    norms = ("q_a_layernorm", "kv_a_layernorm")
    widths = [len(norm.weight) for name in norms if (norm := getattr(attention, name, None)) is not None]
    odd = [width for width in widths if width % MULTIPLE]
    return f"its latent vectors have a width of {odd[0]}; known: multiples of {MULTIPLE}" if odd else None


@frozen(eq=False)
class LatentWriter:
    """A writer of the operations before attention."""

    program: Program
    rooms: Rooms

    def write(self, attention: Any, source: int, to: int, norm: Normed | None) -> None:
        """Writes queries, keys and values, one after the other, to the buffer ``to``."""
        program, shared = self.program, attention.kv_a_proj_with_mqa.panels()
        heads, value, rank = attention.num_heads, attention.v_head_dim, attention.kv_lora_rank
        plain, turned, size = attention.qk_nope_head_dim, attention.qk_rope_head_dim, attention.qk_head_dim
        short, latent = self.rooms("short", attention.q_lora_rank or 1), self.rooms("latent", shared.outputs)
        wide = self.rooms("wide", heads * (plain + value))
        if query_name(attention) == "q_proj":
            program.linear(source, to, attention.q_proj.panels(), Ending.STORE, norm=norm)
        else:
            program.linear(source, short, attention.q_a_proj.panels(), Ending.STORE, norm=norm)
            own = norm_of(attention.q_a_layernorm)
            program.linear(short, to, attention.q_b_proj.panels(), Ending.STORE, norm=own)
        program.linear(source, latent, shared, Ending.STORE, norm=norm)
        own = norm_of(attention.kv_a_layernorm)
        program.linear(latent, wide, attention.kv_b_proj.panels(), Ending.STORE, norm=own)
        keys, each = heads * size, {"count": heads, "apart": plain + value}
        program.copy(wide, to, plain, **each, place=keys, places_apart=size)
        program.copy(latent, to, turned, count=heads, first=rank, place=keys + plain, places_apart=size)
        program.copy(wide, to, value, **each, first=plain, place=2 * keys, places_apart=value)
