"""The weights of one node's experts in the memory of its dies, and how they move to other slots over UB.

Owns what each slot holds, the reads from other ranks' dies, the copy into a slot and the check of both.
Does not own which experts move, nor when (``rebalancing``); the numbers that experts compute with are the
body's. An expert's weights in a layer are charged at their size (``constants.EXPERT_WEIGHTS``) and carried
as 64 bytes that name expert and layer. Reads share links with dispatch and combine; that a copy within HBM
would slow down the experts of its die is not charged.
"""

from __future__ import annotations

import collections

from cmnet.errors import CorruptError, OperationError
from cmnet.launch.agent import Context
from nodes import constants
from nodes.moe import moving
from nodes.moe.job import MoeJob
from nodes.moe.layer import Touch
from nodes.moe.moving import Move
from nodes.moe.placement import EMPTY, Placement
from nodes.moe.rebalancing import Pass
from planes.ub import Ub

CARRIED_BYTES = 64
REGION = 0x5745_0000
"""Region of layer 0; each layer has its own, with a rank's slots one after the other."""

ENGINE = "sdma"
"""Reads weights while the cores dispatch: large blocks without a core, as the shipping operators do."""

Place = tuple[int, int, int]
"""(layer, rank, slot)"""


def pattern(layer: int, expert: int) -> bytes:
    """What is carried for an expert's weights.

    >>> pattern(1, 200).rstrip()
    b'layer 1, expert 200'
    """
    text = "" if expert == EMPTY else f"layer {layer}, expert {expert}"
    return text.encode().ljust(CARRIED_BYTES)


def copy_ps(experts: int) -> int:
    """A die's time to copy so many experts' weights within its HBM: each byte is read and written."""
    rate = constants.HBM_RATE.value * constants.MEMORY_SHARE.value
    return round(2 * moving.EXPERT_BYTES * experts / rate * 1e12)


class Weights:
    """Of the local ranks ``first`` to ``first + ranks - 1``."""

    def __init__(
        self,
        context: Context,
        ub: Ub,
        job: MoeJob,
        *,
        first: int,
        ranks: int,
        placements: tuple[Placement, ...],
        touch: Touch,
    ) -> None:
        self._context, self._ub, self._devices, self._touch = context, ub, job.devices, touch
        self._local = range(first, first + ranks)
        self._bytes = moving.EXPERT_BYTES
        self._spare: dict[Place, bytes] = {}
        """What has been fetched for a slot."""
        self._busy = 0
        """Ranks that have not done what the stage asks of them."""
        self.failed = ""
        """Why something could not be fetched."""
        self.fetched = 0
        """Weights of an expert in a layer that came from another rank."""
        self.fetch_ps = 0
        """The longest fetch of a rank, all layers of a round."""
        for layer, placement in enumerate(placements):
            for rank in self._local:
                self._fill(layer, rank, placement.slots[rank])

    @property
    def ready(self) -> bool:
        """What the stage asks of this node is done."""
        return not self._busy

    def begin(self, now: Pass, *, again: bool) -> None:
        """A pass begins; ``again``: of the same stage and round as the one before it."""
        if now.stage == "prefetch" and not again:
            self._fetch_all(now)
        elif now.stage == "load" and not again:
            self._load_all(now)
        self._check_slots(now)

    def _fill(self, layer: int, rank: int, experts: tuple[int, ...]) -> None:
        self._ub.memory.register(
            self._devices[rank],
            REGION + layer,
            charged_bytes=len(experts) * self._bytes,
            carried_bytes=len(experts) * CARRIED_BYTES,
        )
        for slot, expert in enumerate(experts):
            self._write((layer, rank, slot), pattern(layer, expert))

    # --- prefetch ---------------------------------------------------------------------------------

    def _fetch_all(self, now: Pass) -> None:
        for rank, todo in self._moves(now).items():
            self._busy += 1
            self._context.spawn(self._fetch(rank, todo, now), f"weights of rank {rank}")

    async def _fetch(self, rank: int, todo: list[tuple[int, Move]], now: Pass) -> None:
        """All that a rank needs, one by one: its link would not carry two any faster."""
        began_ps = self._context.loop.now_ps
        for layer, move in todo:
            slots = now.placements[layer].slots[move.source_rank]
            try:
                data = await self._read(layer, move, slots.index(move.expert))
            except OperationError as error:
                self.failed = (
                    f"rank {rank} did not get layer {layer} of expert {move.expert} from rank"
                    f" {move.source_rank}: {error}"
                )
                return
            data = self._touch("prefetched", data)
            _check(data, layer, rank, move.expert, f"from rank {move.source_rank}")
            self._spare[layer, rank, move.slot] = data
        self._busy -= 1
        self.fetch_ps = max(self.fetch_ps, self._context.loop.now_ps - began_ps)

    async def _read(self, layer: int, move: Move, slot: int) -> bytes:
        """From the slot of the rank that has it."""
        if move.source_rank == move.rank:
            return self._held((layer, move.rank, slot))
        data = await self._ub.read(
            source=self._devices[move.rank],
            target=self._devices[move.source_rank],
            region=REGION + layer,
            offset=slot * self._bytes,
            charged_bytes=self._bytes,
            engine=ENGINE,
        )
        self.fetched += 1
        return data

    # --- load, enable -----------------------------------------------------------------------------

    def _load_all(self, now: Pass) -> None:
        loop = self._context.loop
        for rank, todo in self._moves(now).items():
            self._busy += 1
            loop.call_at_ps(loop.now_ps + copy_ps(len(todo)), self._load, rank, todo)

    def _load(self, rank: int, todo: list[tuple[int, Move]]) -> None:
        for layer, move in todo:
            place = (layer, rank, move.slot)
            self._write(place, self._spare.pop(place))
        self._busy -= 1

    def _check_slots(self, now: Pass) -> None:
        """Before the first token comes: a slot of the round that is in use has been loaded."""
        for rank, todo in self._moves(now).items():
            for layer, move in todo:
                if now.placements[layer].slots[rank][move.slot] != move.expert:
                    continue
                data = self._held((layer, rank, move.slot))
                _check(data, layer, rank, move.expert, f"in slot {move.slot}")

    def _moves(self, now: Pass) -> dict[int, list[tuple[int, Move]]]:
        """(layer, move) of each local rank, of those that bring weights."""
        found: dict[int, list[tuple[int, Move]]] = collections.defaultdict(list)
        for layer, moves in enumerate(now.moves):
            for move in moves:
                if move.rank in self._local and move.expert != EMPTY:
                    found[move.rank].append((layer, move))
        return found

    def _held(self, place: Place) -> bytes:
        layer, rank, slot = place
        region = self._ub.memory.region(self._devices[rank], REGION + layer)
        return region.read(slot * self._bytes, self._bytes)

    def _write(self, place: Place, data: bytes) -> None:
        layer, rank, slot = place
        region = self._ub.memory.region(self._devices[rank], REGION + layer)
        region.write(slot * self._bytes, self._bytes, data)


def _check(data: bytes, layer: int, rank: int, expert: int, where: str) -> None:
    if data != pattern(layer, expert):
        wanted = pattern(layer, expert).rstrip().decode()
        what = f"rank {rank} has {data.rstrip()!r} {where}, not the weights of {wanted}"
        raise CorruptError(what, definite=True)
