"""One owner for all memory: everything is released, in reverse order, whatever happens on the way."""

from __future__ import annotations

import pytest

from triolet.models.resources import ResourceStack


def test_close_releases_in_reverse_order_and_once():
    """The last taken is the first given back; a second close does nothing."""
    stack, released = ResourceStack(), []
    for name in "abc":
        stack.register(name, lambda: 1, lambda name=name: released.append(name))
    assert stack.bytes_by_owner() == {"a": 1, "b": 1, "c": 1}
    stack.close()
    stack.close()
    assert released == ["c", "b", "a"]
    assert stack.bytes_by_owner() == {}


def test_a_release_that_raises_stops_no_other():
    """All releases run; what they raised comes out in one group, with the owners' names."""
    stack, released = ResourceStack(), []

    def fail() -> None:
        raise RuntimeError("device lost")

    stack.register("weights", lambda: 1, lambda: released.append("weights"))
    stack.register("pages", lambda: 1, fail)
    stack.register("slots", lambda: 1, fail)
    stack.register("outputs", lambda: 1, lambda: released.append("outputs"))
    with pytest.raises(ExceptionGroup) as caught:
        stack.close()
    assert released == ["outputs", "weights"]
    assert [error.__notes__ for error in caught.value.exceptions] == [
        ["while releasing 'slots'"],
        ["while releasing 'pages'"],
    ]
    stack.close()
    assert stack.bytes_by_owner() == {}


def test_resources_of_one_owner_are_counted_together():
    """An owner may register more than once."""
    stack = ResourceStack()
    stack.register("buffers", lambda: 3, lambda: None)
    stack.register("buffers", lambda: 4, lambda: None)
    assert stack.bytes_by_owner() == {"buffers": 7}
