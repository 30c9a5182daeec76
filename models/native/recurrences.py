"""`Recurrence` and `Gate`: what operations of recurrent layers compute, see `Program`."""

from __future__ import annotations

from attrs import frozen
from torch import Tensor


@frozen(kw_only=True, eq=False)
class Recurrence:
    """Heads with a state each, which is changed from row to row. `native/step.h` says how (``RECUR``).

    Args:
        heads: the number of heads, which have values of ``size`` numbers each.
        groups: the number of queries and keys, of ``depth`` numbers each; neighbouring heads share them.
        first: the first of the 2 * ``heads`` numbers of gates. With the delta rule, they are strengths before decays;
            without it, the second half is room.
        decay, shift: float32 [heads], the factor of the logarithm of decays, and what is added to steps.
        delta: True: what a state has of a key is replaced. False: values are added to it.
        skip: float32 [heads], by which values are added to the outputs; ``None``: they are not.
        scale: the factor of queries.
        epsilon: of the norms of queries and keys, with the delta rule.
        factor, least: of steps: their factor and the smallest one, without the delta rule.
        most: the largest step or, with the delta rule, the largest strength.
    """

    heads: int
    groups: int
    size: int
    depth: int
    first: int
    decay: Tensor
    shift: Tensor
    delta: bool
    skip: Tensor | None = None
    scale: float = 1.0
    epsilon: float = 0.0
    factor: float = 1.0
    least: float = 0.0
    most: float = 1.0


@frozen(kw_only=True, eq=False)
class Gate:
    """Gates of heads with ``size`` numbers each.

    Args:
        column: the first number of a row that is multiplied.
        first: the first gate.
        whole: True: a head has one gate. False: it has one for each number.
        scale: the factor of gates, before their activation.
        activation: of gates; ``None``: there is none.
        gain: float32 [size] or [heads * size], of a root mean square norm of each head; ``None``: there is no norm.
        norm_first: True: the norm is of the numbers. False: it is of what they are multiplied to.
    """

    heads: int
    size: int
    column: int = 0
    first: int = 0
    whole: bool = False
    scale: float = 1.0
    activation: int | None = None
    gain: Tensor | None = None
    epsilon: float = 0.0
    norm_first: bool = True
