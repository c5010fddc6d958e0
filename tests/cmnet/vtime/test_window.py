"""When a grant may run: which frames count."""

from __future__ import annotations

import pytest

from cmnet.vtime.window import WindowGate


def test_frames_of_the_window_in_progress_do_not_count_yet() -> None:
    gate = WindowGate()
    gate.frame_read(1, 3)
    gate.granted(3, 100, 0)
    assert gate.open()
    gate.frame_read(2, 3)
    assert gate.open()
    gate.granted(4, 200, 2)
    assert gate.open()


def test_a_grant_waits_for_the_frames_that_it_names() -> None:
    gate = WindowGate()
    gate.granted(5, 100, 2)
    assert not gate.open()
    gate.frame_read(1, 4)
    gate.frame_read(1, 5)
    assert not gate.open()
    gate.frame_read(2, 1)
    assert gate.open()


def test_frames_that_a_dead_peer_sent_in_its_last_window_never_happened() -> None:
    gate = WindowGate()
    for window in (3, 4, 4, 5):
        gate.frame_read(1, window)
    gate.frame_read(2, 5)
    gate.forget(1, 4)
    gate.granted(6, 100, 2)
    assert gate.open()


def test_a_frame_too_many_is_a_bug() -> None:
    gate = WindowGate()
    gate.granted(5, 100, 0)
    gate.frame_read(1, 4)
    with pytest.raises(AssertionError, match="not accounted for"):
        gate.open()
