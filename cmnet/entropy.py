"""Named random streams of a run's one seed.

Owns all randomness: a stream is a function of (seed, name) alone, so that adding one never moves
another. Philox is counter based and its raw bits are fixed by its authors (Salmon et al., SC'11);
numpy's Generator methods may change between versions and are not used.
"""

from __future__ import annotations

import hashlib

import numpy as np


class Stream:
    """Uniform integers below 2^64 and what is made of them by integer arithmetic."""

    __slots__ = ("_bits",)

    def __init__(self, key: int) -> None:
        self._bits = np.random.Philox(key=key)

    def u64(self) -> int:
        """One integer in [0, 2^64)."""
        return int(self._bits.random_raw())

    def below(self, count: int) -> int:
        """One integer in [0, count); the bias of at most count / 2^64 is accepted."""
        return (self.u64() * count) >> 64

    def chance(self, probability: float) -> bool:
        """True with the probability, which is first taken to the nearest 2^-53."""
        return (self.u64() >> 11) < int(probability * 2**53)

    def unit(self) -> float:
        """A float in [0, 1), multiple of 2^-53."""
        return float((self.u64() >> 11) * 2.0**-53)


def stream(seed: int, name: str) -> Stream:
    """The stream of this name in the run of this seed, from its beginning."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest()
    return Stream(int.from_bytes(digest, "little"))
