"""An error without the locals of its frames, and nobody else's."""

from __future__ import annotations

import sys
import weakref

import numpy as np
import pytest

from triolet.core.errors import EncodeFailed
from triolet.core.tracebacks import clear_frames

from .texts import encode_job


class Big:
    """Stands for a tensor."""


def fail(watched, *, cause=None):
    big = Big()
    watched.append(weakref.ref(big))
    raise RuntimeError("planted") from cause


def failure(watched, **settings):
    try:
        fail(watched, **settings)
    except RuntimeError as error:
        return error


def test_causes_contexts_groups_and_rings_are_cleared(no_collector):
    """Wherever the error came through, the locals die, though it is kept."""
    watched = []
    cause = failure(watched)
    chained = failure(watched, cause=cause)
    try:
        try:
            fail(watched)
        except RuntimeError:
            fail(watched)
    except RuntimeError as error:
        in_context = error
    one, other = failure(watched), failure(watched)
    one.__cause__, other.__cause__ = other, one  # an error may be in its own context's context
    group = ExceptionGroup("all", [chained, in_context, one])
    assert all(reference() is not None for reference in watched)
    clear_frames(group)
    assert [reference() for reference in watched] == [None] * 6
    one.__cause__ = None


def test_what_was_handled_before_is_somebody_elses(no_collector):
    """An error that was being handled when the call was made keeps its frames: they are the caller's."""
    watched = []
    try:
        fail(watched)
    except RuntimeError:
        outer = sys.exception()
        theirs = failure(watched)
        clear_frames(theirs, outer=outer)
        assert [reference() is not None for reference in watched] == [True, False]
        clear_frames(theirs)
        assert [reference() is not None for reference in watched] == [False, False]
        del outer, theirs


def test_the_executor_leaves_its_callers_errors_alone(driver, no_collector):
    """It is called while an error is handled, and fails: the frames of that error stay as they are."""
    watched = []
    try:
        fail(watched)
    except RuntimeError:
        with pytest.raises(AssertionError, match="is awake"):
            driver.executor.wake()
        assert watched[0]() is not None


def test_r5_a_kept_error_pins_no_payload(driver, no_collector):
    """R5: an exception that was caught on the worker pins what its frames hold: here the samples that it refused, in
    the frame of the call itself, which still ran when the others were cleared."""
    payload = np.full(1_000, np.nan, dtype=np.float32)
    jobs = (encode_job(driver.description, "bad", payload),)
    watched = weakref.ref(payload)
    with pytest.raises(EncodeFailed) as kept:
        driver.executor.encode(jobs)
    del jobs, payload
    assert watched() is None
    assert kept.value.__traceback__ is not None
