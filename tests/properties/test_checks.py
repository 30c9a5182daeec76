"""What may be set: whatever is given, a setting is of its declared type, or `InvalidRequest` says what is allowed."""

from __future__ import annotations

import collections.abc
import math
import types
import typing

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triolet import EngineConfig, InvalidRequest, SamplingParams, Speculation
from triolet.core.request import Pooling, Probe, Structure


async def listen(event: object) -> None:
    """Nobody would await it."""


class Listener:
    async def __call__(self, event: object) -> None:
        """Nor this."""


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"observer": 3}, "observer=3; allowed: a function"),
        ({"observer": listen}, "not async"),
        ({"observer": Listener()}, "not async"),
        ({"observer": Listener}, "a function"),
        ({"verify": "yes"}, "verify='yes'; allowed: True or False"),
        ({"page_size": 10**9}, "1 to 65536"),
        ({"page_size": True}, "an integer"),
        ({"page_size": "16"}, "an integer"),
        ({"page_size": 16.0}, "an integer"),
        ({"max_pending": math.inf}, "max_pending=inf; allowed: an integer"),
        ({"self_kv_bytes": "4GiB"}, "self_kv_bytes='4GiB'; allowed: an integer"),
        ({"threads": -1}, "0 to 1024"),
        ({"restart_seconds": 0}, "restart_seconds=0; allowed: a number, more than 0; restarts=0: never"),
        ({"restart_seconds": math.nan}, "more than 0"),
        ({"stage_seconds": 0}, "stage_seconds=0; allowed: a number, more than 0, up to 86400"),
        ({"stage_seconds": math.inf}, "up to 86400"),
        ({"drain_seconds": True}, "a number"),
        ({"idle_sleep": None}, "math.inf: never"),
        ({"while_asleep": "sleep"}, "'wait' or 'refuse'"),
        ({"dtype": np.float16}, "'bfloat16'"),
        ({"kv_dtype": "int8"}, "kv_dtype='int8'; allowed: 'auto', 'float32', 'float16' or 'bfloat16'"),
        ({"quantization": "int3"}, "quantization='int3'; allowed: 'int8' or 'int4'; None: weights as they are"),
        ({"graphs": "on"}, "allowed: 'auto', 'off' or 'eager'"),
        ({"device": "gpu"}, r"device='gpu'; allowed: .auto., .cpu., .cuda. or .cuda:N."),
        ({"device": "cuda:one"}, "'cuda:N'"),
        ({"device": ""}, "'cuda:N'"),
        ({"device": 0}, "'cuda:N'"),
        ({"device": "cuda:0,cuda:1"}, "an engine runs on one device: open an engine for each, or replicas"),
        ({"device": ("cuda:0", "cuda:1")}, "device=.*'cuda:N'.*open an engine for each, or replicas in a cluster"),
        ({"devices": ("cuda:0", "cuda:1")}, "did you mean device?"),
        ({"speculation": True}, "Speculation"),
        ({"speculation": Speculation}, "Speculation"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_a_setting_that_cannot_work_is_refused_with_what_is_allowed(wrong, told):
    with pytest.raises(InvalidRequest, match=told):
        EngineConfig(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": 0},
        {"match": 2.0},
    ],
    ids=str,
)
def test_a_speculation_that_cannot_work_is_refused(wrong):
    with pytest.raises(InvalidRequest, match=rf"Speculation\.{next(iter(wrong))}=.*; allowed: "):
        Speculation(**wrong)


def test_ends_that_mean_something_are_allowed():
    config = EngineConfig(
        drain_seconds=math.inf, idle_sleep=0, restart_seconds=math.inf, encoder_idle_seconds=math.inf, restarts=0
    )
    assert config.drain_seconds == config.restart_seconds == config.encoder_idle_seconds == math.inf
    assert EngineConfig(drain_seconds=0).drain_seconds == 0.0


def is_of(value: object, declared: object) -> bool:
    """Whether ``value`` is of exactly the ``declared`` type: an int is no bool, a float no int."""
    origin, parts = typing.get_origin(declared), typing.get_args(declared)
    if origin in (typing.Union, types.UnionType):
        return any(is_of(value, part) for part in parts)
    if origin is tuple:
        each = parts[:1] * len(value) if parts[-1] is Ellipsis else parts
        return type(value) is tuple and len(value) == len(each) and all(map(is_of, value, each))
    if origin is collections.abc.Callable:
        return callable(value)
    return isinstance(value, str) if declared is str else type(value) is declared


NUMBERS = (
    st.integers()
    | st.floats()
    | st.booleans()
    | st.sampled_from([10**4000, -(10**400), 2**31, 2**63, 2**64, 0, 1, 2, 3])
    | st.builds(np.int64, st.integers(-(2**63), 2**63 - 1))
    | st.builds(np.uint8, st.integers(0, 255))
    | st.builds(np.float32, st.floats(width=32))
    | st.builds(np.bool_, st.booleans())
    | st.fractions()
    | st.decimals()
    | st.complex_numbers()
)
TEXTS = st.text() | st.sampled_from(
    ["auto", "cpu", "wait", "off", "mean", "regex", "choice", "float16", np.str_("auto")]
)
SINGLE = NUMBERS | TEXTS | st.none() | st.binary() | st.just(print) | st.builds(object) | st.just(Speculation())
ANYTHING = (
    SINGLE
    | st.lists(SINGLE)
    | st.dictionaries(st.integers(0, 9) | TEXTS, NUMBERS)
    | st.sets(st.integers())
    | st.lists(st.tuples(st.integers(0, 9), NUMBERS))
    | st.builds(np.array, st.lists(st.integers(-9, 9)) | st.integers(0, 9) | st.lists(st.floats()))
    | st.builds(lambda texts: (text for text in texts), st.lists(TEXTS))
)
KINDS = {
    EngineConfig: {},
    Speculation: {},
    SamplingParams: {},
    Structure: {"kind": "regex", "text": "a"},
    Pooling: {"kind": "mean"},
    Probe: {"position": 0, "token_ids": (1,)},
}
FIELDS = [(kind, one.name) for kind in KINDS for one in attrs.fields(kind)]


@pytest.mark.parametrize(("kind", "name"), FIELDS, ids=[f"{kind.__name__}.{name}" for kind, name in FIELDS])
@settings(max_examples=20)
@given(value=ANYTHING)
def test_whatever_is_given_a_field_is_of_its_type_or_the_caller_hears_why(kind, name, value):
    try:
        kept = getattr(kind(**{**KINDS[kind], name: value}), name)
    except InvalidRequest as error:
        told = str(error)
    else:
        told = ""
        assert is_of(kept, typing.get_type_hints(kind)[name]), f"{value!r} was kept as {kept!r}"
        assert not (isinstance(kept, float) and math.isnan(kept))
    assert not told or "allowed: " in told
    assert len(told) < 1_000, "what is huge is cut"
