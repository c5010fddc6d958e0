"""Memory of devices that others may reach: registered regions, in charged and in carried bytes.

Owns the bytes and the bounds. Does not own how accesses travel (UB, RDMA). Offsets and lengths on the
wire are *charged* ones, as the real machine has them; a region may carry fewer bytes, then a charged
offset lies at its proportional place.
"""

from __future__ import annotations

from cmnet.errors import MemoryRangeError


class Region:
    """A registered piece of one device's memory."""

    __slots__ = ("charged_bytes", "data", "number")

    def __init__(self, number: int, charged_bytes: int, carried_bytes: int) -> None:
        self.number = number
        self.charged_bytes = charged_bytes
        self.data = bytearray(carried_bytes)

    def span(self, offset: int, charged_bytes: int) -> slice:
        """Where a charged range lies in ``data``. Raises MemoryRangeError outside the region."""
        if offset < 0 or charged_bytes < 0 or offset + charged_bytes > self.charged_bytes:
            raise MemoryRangeError(
                f"bytes {offset} to {offset + charged_bytes} of region {self.number}, which has"
                f" {self.charged_bytes}",
                definite=True,
            )
        if len(self.data) == self.charged_bytes:
            return slice(offset, offset + charged_bytes)
        carried_bytes, whole_bytes = len(self.data), max(self.charged_bytes, 1)
        end = (offset + charged_bytes) * carried_bytes // whole_bytes
        return slice(offset * carried_bytes // whole_bytes, end)

    def write(self, offset: int, charged_bytes: int, data: bytes | bytearray | memoryview) -> None:
        """Put data at the begin of a range. Raises MemoryRangeError if it does not hold them."""
        span = self.span(offset, charged_bytes)
        if len(data) > span.stop - span.start:
            raise MemoryRangeError(
                f"{len(data)} carried bytes in a range of region {self.number} that carries"
                f" {span.stop - span.start}",
                definite=True,
            )
        self.data[span.start : span.start + len(data)] = data

    def read(self, offset: int, charged_bytes: int) -> bytes:
        """The carried bytes of a range, now. Raises MemoryRangeError."""
        return bytes(self.data[self.span(offset, charged_bytes)])


class Memory:
    """All regions of this process's devices; planes may share it."""

    def __init__(self) -> None:
        self._regions: dict[tuple[int, int], Region] = {}

    def register(
        self, device: int, number: int, *, charged_bytes: int, carried_bytes: int | None = None
    ) -> Region:
        """A new region; ``carried_bytes`` None means every byte is carried."""
        assert (device, number) not in self._regions, (device, number)
        carried_bytes = charged_bytes if carried_bytes is None else carried_bytes
        region = self._regions[device, number] = Region(number, charged_bytes, carried_bytes)
        return region

    def unregister(self, device: int, number: int) -> None:
        """From now on accesses are refused."""
        del self._regions[device, number]

    def region(self, device: int, number: int) -> Region:
        """The region of this number. Raises MemoryRangeError where none is."""
        region = self._regions.get((device, number))
        if region is None:
            raise MemoryRangeError(f"no region {number} is registered", definite=True)
        return region
