"""One owner for all memory: everything is released, in reverse order, whatever happens on the way, and counted as it
is, not as its owner says."""

from __future__ import annotations

import pytest
import torch
from attrs import define, field

from triolet.models.memory.resources import ReleaseReport, ResourceStack, reachable_tensors


@define(eq=False)
class Buffers:
    """A holder of tensors."""

    held: list[torch.Tensor] = field(factory=list)

    @classmethod
    def of(cls, *sizes):
        return cls([torch.zeros(size, dtype=torch.uint8) for size in sizes])

    def tensors(self):
        return self.held

    def release(self):
        self.held.clear()


class Unwilling(Buffers):
    """Its release raises, with a tensor in the frame."""

    def release(self):
        kept = list(self.held)
        raise RuntimeError(f"{len(kept)} buffers: device lost")


def test_close_releases_in_reverse_order_and_once():
    """The last taken is the first given back; a second close does nothing."""
    stack, released = ResourceStack(), []
    for name in "abc":
        stack.callback(name, lambda name=name: released.append(name))
    stack.close()
    stack.close()
    assert released == ["c", "b", "a"]
    assert stack.bytes_by_owner() == {}


def test_a_release_that_raises_stops_no_other(no_collector):
    """All releases run; what they raised comes out in one group, with the owners' names. The error keeps no tensor, so
    even who would not release has nothing left."""
    stack, released = ResourceStack(), []
    stack.callback("weights", lambda: released.append("weights"))
    stack.own("pages", Unwilling.of(3))
    stack.own("slots", Unwilling.of(4))
    stack.own("outputs", Buffers.of(5))
    stack.callback("outputs", lambda: released.append("outputs"))
    with pytest.raises(ExceptionGroup) as caught:
        stack.close()
    assert released == ["outputs", "weights"]
    assert [error.__notes__ for error in caught.value.exceptions] == [
        ["while releasing 'slots'"],
        ["while releasing 'pages'"],
    ]
    assert stack.report.before == {"pages": 3, "slots": 4, "outputs": 5}
    assert stack.report.after == {"pages": 0, "slots": 0, "outputs": 0}
    assert stack.close() == ReleaseReport()
    assert stack.bytes_by_owner() == {}


def test_an_interrupt_in_a_release_waits_for_the_others():
    """What is no `Exception` stops no release either."""
    stack, released = ResourceStack(), []

    def interrupt():
        raise KeyboardInterrupt

    stack.callback("weights", lambda: released.append("weights"))
    stack.callback("pages", interrupt)
    with pytest.raises(BaseExceptionGroup) as caught:
        stack.close()
    assert released == ["weights"]
    assert isinstance(caught.value.exceptions[0], KeyboardInterrupt)


def test_a_holder_that_cannot_count_is_released():
    """The error comes out with the others; the report tells of the rest."""

    class Confused(Buffers):
        def tensors(self):
            raise RuntimeError("half built")

    stack = ResourceStack()
    confused = stack.own("slots", Confused.of(1))
    stack.own("pages", Buffers.of(2))
    with pytest.raises(ExceptionGroup) as caught:
        stack.close()
    assert caught.value.exceptions[0].__notes__ == ["while counting 'slots'"]
    assert confused.held == []
    assert stack.report == ReleaseReport(before={"slots": 0, "pages": 2}, after={"slots": 0, "pages": 0})


def test_what_is_counted_is_the_storage():
    """A view pins its whole storage; a storage that is held twice counts once, for its first owner, and both are
    named."""
    whole = torch.zeros(100, dtype=torch.uint8)
    stack = ResourceStack()
    stack.own("views", Buffers([whole[:10], whole[10:20]]))
    assert stack.bytes_by_owner() == {"views": 100}
    stack.own("wholes", Buffers([whole]))
    assert stack.bytes_by_owner() == {"views": 100, "wholes": 0}
    assert list(stack.owners().values()) == [("views", "wholes")]


def keep_a_view(tensor):
    return tensor[:1]


def keep_an_array(tensor):
    return tensor.numpy()


def keep_in_a_cycle(tensor):
    cycle = [tensor]
    cycle.append(cycle)


@pytest.mark.parametrize("keep", [keep_a_view, keep_an_array, keep_in_a_cycle])
def test_what_outlives_its_release_is_told(no_collector, keep):
    """Its owner has forgotten it; a view, an array that shares its memory or a cycle has not. It counts until it is
    dead, in the report and afterwards."""
    stack = ResourceStack()
    pages = stack.own("pages", Buffers.of(8))
    stack.own("slots", Buffers.of(4))
    kept = keep(pages.held[0])
    report = stack.close()
    assert report == ReleaseReport(before={"pages": 8, "slots": 4}, after={"pages": 8, "slots": 0})
    assert report.kept == stack.bytes_by_owner() == {"pages": 8}
    if kept is not None:
        del kept
        assert stack.bytes_by_owner() == {}


def test_what_is_handed_on_is_not_kept():
    """Weights that are parked where they are have an owner: the next one."""
    device, host = ResourceStack(), ResourceStack()
    weights = device.own("weights", Buffers.of(8))
    parked = host.own("parked_weights", Buffers(list(weights.held)))
    assert device.close(handed_on=parked.tensors()).after == {"weights": 0}
    assert device.bytes_by_owner() == {}
    assert host.bytes_by_owner() == {"parked_weights": 8}
    del weights, parked
    assert host.close().kept == {}


def test_forgotten_tensors_are_found():
    """In attributes, containers, closures, defaults and bound methods; not in modules, classes and globals."""

    class Graph:
        shared = torch.zeros(1)

        def __init__(self):
            self.statics = {"inputs": (torch.zeros(2), [torch.zeros(3)])}
            captured = torch.zeros(4)
            self.replay = lambda default=torch.zeros(5): captured  # noqa: B008
            self.module, self.bound = torch, Buffers.of(6).tensors
            self.myself = self

    graph, stack = Graph(), ResourceStack()
    assert sorted(len(tensor) for tensor in reachable_tensors(graph)) == [2, 3, 4, 5, 6]
    stack.own("statics", Buffers([graph.statics["inputs"][0], *graph.statics["inputs"][1]]))
    assert sorted(len(tensor) for tensor in stack.unowned(graph)) == [4, 5, 6]
