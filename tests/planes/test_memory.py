"""Memory: bounds in charged bytes, and where they lie in carried ones."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cmnet.errors import MemoryRangeError
from planes.memory import Memory, Region


@given(
    charged=st.integers(1, 1000),
    carried=st.integers(0, 1000),
    cuts=st.lists(st.integers(0, 1000), max_size=6),
)
@settings(deadline=None, max_examples=100)
def test_neighbouring_ranges_share_no_carried_byte_and_leave_none_out(
    charged: int, carried: int, cuts: list[int]
) -> None:
    """Whatever part is carried: ranges that tile the charged bytes tile the carried ones."""
    region = Region(1, charged, carried)
    edges = sorted({0, charged, *(cut % (charged + 1) for cut in cuts)})
    spans = [region.span(a, b - a) for a, b in itertools.pairwise(edges)]
    assert [(s.start, s.stop) for s in spans] == [
        (a * carried // charged, b * carried // charged) for a, b in itertools.pairwise(edges)
    ]
    assert spans[0].start == 0 and spans[-1].stop == carried


@pytest.mark.parametrize(("offset", "size"), [(-1, 2), (9, 2), (11, 0), (0, 11), (3, -1)])
def test_a_range_outside_is_refused(offset: int, size: int) -> None:
    """Definite: nothing was done."""
    region = Region(1, 10, 10)
    with pytest.raises(MemoryRangeError) as caught:
        region.write(offset, size, b"")
    assert caught.value.definite
    assert region.span(10, 0) == slice(10, 10)


def test_data_stay_within_their_range() -> None:
    """Also where fewer bytes are carried than charged."""
    region = Region(1, 100, 10)
    region.write(50, 30, b"abc")
    assert region.read(40, 50) == b"\0abc\0"
    with pytest.raises(MemoryRangeError):
        region.write(50, 30, b"abcd")


def test_what_is_unregistered_is_gone() -> None:
    """A number may be used again after that."""
    memory = Memory()
    region = memory.register(3, 1, charged_bytes=5)
    assert memory.region(3, 1) is region
    memory.unregister(3, 1)
    with pytest.raises(MemoryRangeError):
        memory.region(3, 1)
    assert memory.register(3, 1, charged_bytes=6).charged_bytes == 6
