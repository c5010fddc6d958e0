"""Plans of link faults for the mini machine, some drawn at random. Test code only."""

from __future__ import annotations

from cmnet import entropy
from cmnet.chaos import plan as plans
from cmnet.link.rules import Rule
from tests.nodes.serving import local


def rules(plan: str) -> tuple[Rule, ...]:
    return plans.parse(plan, file="test", machine=local.mini()).rules


PLACES = ("node00", "node01", "node02", "node03", "gateway", "node02/npu0/die0", "node03/npu1/die1")
EFFECTS = (
    "kind: loss, p: 0.9",
    "kind: loss, p: 0.1",
    "kind: partition",
    "kind: partition, one_way: true",
    "kind: delay, delay: 700 ms",
    "kind: jitter, jitter: 3 s",
    "kind: corrupt, p: 0.2",
    "kind: duplicate, p: 0.7",
    "kind: flap, period: 900 ms, down: 400 ms",
    "kind: rate, factor: 0.001",
)


def random_plan(number: int) -> str:
    """Up to six faults anywhere, for up to ten seconds each."""
    draws = entropy.stream(9, f"plan {number}")
    faults = []
    for _ in range(1 + draws.below(6)):
        at_ms, for_ms = draws.below(9000), 1 + draws.below(10_000)
        place, effect = PLACES[draws.below(len(PLACES))], EFFECTS[draws.below(len(EFFECTS))]
        when = f"at: {at_ms} ms, for: {for_ms} ms"
        planes = (
            ("vpc",) if place == "gateway" else ("ub", "rdma", "vpc")[: 2 if "/" in place else 3]
        )
        plane = planes[draws.below(len(planes))]
        faults.append(f"{{{when}, target: {place}, plane: {plane}, {effect}}}")
    return f"[{', '.join(faults)}]"
