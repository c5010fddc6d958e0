"""Static buffers of dispatch and combine: their sizes. Pure.

Owns the published formula (arXiv 2506.12708, section 4.2.1: ``rank_num x max_tokens x msg_size`` with
``max_tokens = batch x min(top_k, experts_per_die)``) and what the slot rule can touch of it. Does not own
who writes where (``detector``).
"""

from __future__ import annotations

from nodes.settings import ModelSettings


def max_tokens(batch: int, experts_per_die: int, model: ModelSettings) -> int:
    """Slots of one source at one die."""
    return batch * min(model.top_k, experts_per_die)


def dispatch_buffer_bytes(
    *, ep_size: int, batch: int, experts_per_die: int, model: ModelSettings
) -> int:
    """Charged memory of a die: 225 MiB at EP 320, batch 96 and one expert a die."""
    return ep_size * max_tokens(batch, experts_per_die, model) * model.dispatch_bytes


def combine_buffer_bytes(
    *, ep_size: int, batch: int, experts_per_die: int, model: ModelSettings
) -> int:
    """Charged memory of a die: 420 MiB at EP 320, batch 96 and one expert a die."""
    return ep_size * max_tokens(batch, experts_per_die, model) * model.combine_bytes


def combine_touched_bytes(*, batch: int, slots_per_token: int, model: ModelSettings) -> int:
    """What the slot rule (token, k) can write of the combine buffer."""
    return batch * slots_per_token * model.combine_bytes
