"""Which prefill rank a decode rank takes its KV rows from.

Owns the connection grouping of CloudMatrix-Infer (arXiv 2506.12708, prefill-decode transfer) for one
prefill instance and one decode instance. Does not own connections or transfers. After prefill every
rank of the instance holds the same KV rows, so any could give them; without grouping all decode ranks
would ask the same one and wait for its port. Grouping gives each prefill rank equally many.

    ratio           = prefill_tp_size / decode_tp_size
    group_size      = decode_dp_size / ratio
    group_id        = floor(decode_dp_rank / group_size)
    prefill_tp_rank = group_id * decode_tp_size + decode_tp_rank

In the evaluated deployment (prefill TP32, decode TP1, decode DP320) the ratio is 32 and a group has 10
decode ranks. (A public reading of the paper prints 1/10 and 3,200, which would send all to rank 0.)

>>> groups = Groups(prefill_tp_size=32, decode_tp_size=1, decode_dp_size=320)
>>> groups.ratio, groups.group_size
(32, 10)
>>> [groups.prefill_tp_rank(decode_dp_rank=rank) for rank in (0, 9, 10, 319)]
[0, 0, 1, 31]
"""

from __future__ import annotations

import msgspec


class Groups(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sizes that decide. Raises ValueError, naming the size and what would be right."""

    prefill_tp_size: int
    """Ranks of the prefill instance; each holds all KV rows of a prompt (or of its heads)."""
    decode_tp_size: int = 1
    """Ranks that share one decode sequence."""
    decode_dp_size: int
    """Decode ranks (or groups of ``decode_tp_size`` ranks) with sequences of their own."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is wrong; expected 1 or more")
        _check_divides(
            "prefill_tp_size", self.prefill_tp_size, "decode_tp_size", self.decode_tp_size
        )
        _check_divides(
            "decode_dp_size", self.decode_dp_size, "prefill / decode TP ratio", self.ratio
        )

    @property
    def ratio(self) -> int:
        """Groups of decode ranks."""
        return self.prefill_tp_size // self.decode_tp_size

    @property
    def group_size(self) -> int:
        """Decode DP ranks of one group."""
        return self.decode_dp_size // self.ratio

    def group_id(self, decode_dp_rank: int) -> int:
        """The group of a decode DP rank, from 0."""
        assert 0 <= decode_dp_rank < self.decode_dp_size, decode_dp_rank
        return decode_dp_rank // self.group_size

    def prefill_tp_rank(self, *, decode_dp_rank: int, decode_tp_rank: int = 0) -> int:
        """The prefill rank that this decode rank is connected to."""
        assert 0 <= decode_tp_rank < self.decode_tp_size, decode_tp_rank
        return self.group_id(decode_dp_rank) * self.decode_tp_size + decode_tp_rank


def _check_divides(name: str, size: int, divisor_name: str, divisor: int) -> None:
    if size % divisor:
        raise ValueError(
            f"{name}: {size} is wrong; expected a multiple of {divisor} ({divisor_name}), "
            "so that every prefill rank serves equally many decode ranks"
        )
