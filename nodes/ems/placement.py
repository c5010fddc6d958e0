"""Which node owns a key: a slot table made from the list of nodes alone.

Owns the view (epoch, nodes, owner of each of 16,384 slots) and its digest. Does not own membership,
leases or moving data: whoever changes the nodes makes a new view with a larger epoch. Pure.

Each slot goes to the node with the highest score for it (rendezvous hashing), unless that node is
full, which means at 1.15 times its fair share of slots; then a full node keeps the slots it scores
highest and the others go to their next choice, and so on until no node is above its limit. Slots
rank nodes and nodes rank slots by the same scores, so the table depends neither on the order of
the list nor on what the view was before.

What holds when a node is removed (or, read backwards, added): a slot that had and has its first
choice stays where it is. So the slots that move without being the removed node's are at most those
that miss their first choice before plus those that miss it after; with no full node, none.

A score is one step of the splitmix64 generator (Steele, Lea, Flood, OOPSLA'14) seeded with the
hash of the node's name: 786,432 of them are one numpy expression, where one xxh3 call each would
take half a second. The arithmetic is integer only: floating-point logarithms, usual for weights,
differ between machines. A node of weight w takes part w times and counts with its best score,
which gives it w shares exactly.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

SLOTS = 16_384
"""Slots of a view: 341 for each of 48 nodes. Later also the unit of moving and repair."""

WEIGHT_MAX = 16
LOAD_LIMIT = (23, 20)
"""Full means 1.15 of the fair share. Removing each of node00 to node47 in turn moves so many slots
of the others, mean and most, of 16,384: 27.0 and 40 with a limit of 1.05, 9.5 and 18 with 1.10,
1.5 and 8 with 1.15, none without one. Without one the fullest of 48 nodes holds 1.12 shares in
half of 300 sets of names and more than 1.18 in 1 % of them; 1.15 bounds that and costs next to
nothing."""

_GOLDEN = 0x9E3779B97F4A7C15

Scores = npt.NDArray[np.uint64]
Owners = npt.NDArray[np.intp]


class NodeWeight(msgspec.Struct, frozen=True):
    """A node that takes part, by its configured name, and how many shares it takes."""

    node_id: str
    weight: int = 1


class View(msgspec.Struct, frozen=True):
    """Who serves which slot. Made by `make_view` only."""

    epoch: int
    nodes: tuple[NodeWeight, ...]
    """Sorted by node id."""
    owners: tuple[int, ...]
    """For each slot the index of its owner in ``nodes``."""

    def owner(self, key: bytes) -> str:
        """The node id that serves this key."""
        return self.nodes[self.owners[slot_of(key)]].node_id

    def slots_of(self, node_id: str) -> tuple[int, ...]:
        """All slots of one node, rising; none if it takes no part."""
        return tuple(
            s for s, index in enumerate(self.owners) if self.nodes[index].node_id == node_id
        )

    def digest(self) -> bytes:
        """sha256 over the view's canonical bytes; two ends compare it with the epoch."""
        parts = [struct.pack("<8sQI", b"emsview1", self.epoch, len(self.nodes))]
        for node in self.nodes:
            name = node.node_id.encode()
            parts.append(struct.pack("<HH", node.weight, len(name)) + name)
        parts.append(struct.pack(f"<{SLOTS}H", *self.owners))
        return hashlib.sha256(b"".join(parts)).digest()


def slot_of(key: bytes) -> int:
    """The slot of a key. xxh3 places and checks; it never identifies."""
    return xxhash.xxh3_64_intdigest(key) & (SLOTS - 1)


def make_view(epoch: int, nodes: Iterable[NodeWeight]) -> View:
    """The view of these nodes, in any order. Raises ValueError that says what would be right."""
    ordered = tuple(sorted(nodes, key=lambda node: node.node_id))
    if not 0 < len({node.node_id for node in ordered}) == len(ordered) <= SLOTS:
        raise ValueError(f"nodes with different names, from 1 to {SLOTS}")
    for node in ordered:
        if not 1 <= node.weight <= WEIGHT_MAX:
            raise ValueError(
                f"a weight of {node.node_id} from 1 to {WEIGHT_MAX}, not {node.weight}"
            )
    scores = np.stack([_scores(node) for node in ordered])
    owners = _share_out(scores, limits=_limits([node.weight for node in ordered]))
    return View(epoch=epoch, nodes=ordered, owners=tuple(owners.tolist()))


def _limits(weights: list[int]) -> list[int]:
    """The most slots each node may hold: ceil(1.15 x its share)."""
    top, bottom = LOAD_LIMIT
    return [-(-SLOTS * weight * top // (sum(weights) * bottom)) for weight in weights]


def _node_seed(node_id: str, share: int) -> int:
    return xxhash.xxh3_64_intdigest(node_id.encode(), seed=share)


def _scores(node: NodeWeight) -> Scores:
    """The node's score for each slot, above 0."""
    seeds = [_node_seed(node.node_id, share) for share in range(node.weight)]
    steps = np.arange(1, SLOTS + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    state = np.array(seeds, dtype=np.uint64)[:, None] + steps
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    best: Scores = (state ^ (state >> np.uint64(31))).max(axis=0)
    return best | np.uint64(1)


def _share_out(scores: Scores, *, limits: list[int]) -> Owners:
    """Owner of each slot: the highest score among nodes that are not full; ties to the smaller id.

    Deferred acceptance: a node above its limit turns away the slots it scores lowest (score 0,
    which it never had), these choose again, until no node is above its limit. Changes ``scores``.
    """
    owners: Owners = scores.argmax(axis=0)
    while (full := np.flatnonzero(np.bincount(owners, minlength=len(limits)) > limits)).size:
        for node in full:
            held = np.flatnonzero(owners == node)
            ranked = held[np.argsort(~scores[node, held], kind="stable")]
            turned_away = ranked[limits[node] :]
            scores[node, turned_away] = 0
            owners[turned_away] = scores[:, turned_away].argmax(axis=0)
    return owners
