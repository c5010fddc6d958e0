"""The byte layout of frames and greetings."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cmnet.errors import FrameError
from cmnet.wire import frames

TOKEN = bytes(range(16))


def test_the_header_is_64_bytes_and_the_greeting_28() -> None:
    """Both are part of the wire: a change is a new version."""
    assert (frames.HEADER.size, frames.HELLO.size) == (64, 28)


@settings(deadline=None, max_examples=100)
@given(
    plane=st.integers(0, 255), process=st.integers(0, 2**16 - 1), incarnation=st.integers(0, 2**31)
)
def test_a_greeting_says_who_sends(plane: int, process: int, incarnation: int) -> None:
    data = frames.hello(plane=plane, process=process, incarnation=incarnation, token=TOKEN)
    assert frames.read_hello(bytes(data), TOKEN) == (plane, process, incarnation)


@pytest.mark.parametrize("at", range(28))
def test_a_stranger_is_refused_whichever_byte_is_wrong(at: int) -> None:
    """Of tag, version and token: plane, process and incarnation (bytes 5 to 11) are not secrets."""
    data = bytearray(frames.hello(plane=1, process=2, incarnation=3, token=TOKEN))
    data[at] ^= 0x40
    if 5 <= at < 12:
        assert frames.read_hello(bytes(data), TOKEN) != (1, 2, 3)
    else:
        with pytest.raises(FrameError, match="does not belong"):
            frames.read_hello(bytes(data), TOKEN)


@pytest.mark.parametrize(
    ("body_bytes", "payload_bytes", "magic"),
    [
        (frames.BODY_BYTES_MAX + 1, 0, frames.MAGIC),
        (0, frames.PAYLOAD_BYTES_MAX + 1, frames.MAGIC),
        (2**32 - 1, 2**32 - 1, frames.MAGIC),
        (0, 0, frames.MAGIC ^ 1),
    ],
)
def test_lengths_are_checked_before_anything_is_allocated(
    body_bytes: int, payload_bytes: int, magic: int
) -> None:
    with pytest.raises(FrameError):
        frames.check_lengths(body_bytes, payload_bytes, magic)
    frames.check_lengths(frames.BODY_BYTES_MAX, frames.PAYLOAD_BYTES_MAX, frames.MAGIC)
