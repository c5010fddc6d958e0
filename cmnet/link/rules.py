"""The rule table: which faults act on a frame when its egress starts, and what they make of it.

Owns the leases (owner, start, end) and the order: rules are asked in the order of their creation,
delays add, rates multiply, the first drop ends it (design 2.4). Ends it means: no later rule is asked,
so none of them draws. The rate is the ports' and holds for a lost frame too. Does not own the kinds
(effects.py), where a rule acts (reach.py), the draws (verdicts.py), the clock, or what a plane does
about a frame that is lost, corrupt, late or doubled.

A rule draws from its own stream, once per frame in its reach while it is in force (burst_loss twice,
whatever its parameters are), so adding or removing one moves the draws of another only by which
frames it lets through. One table belongs to one process: its ``draw`` should name the process too,
lest all nodes lose the same of their frames.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any, Protocol

import msgspec

from cmnet import entropy
from cmnet.errors import InputError
from cmnet.link import effects, verdicts
from cmnet.link.reach import FrameFacts, Where
from cmnet.units import NEVER_PS


class Rule(msgspec.Struct, frozen=True, kw_only=True, tag="rule"):
    """A lease: the effect acts where it says from ``start_ps`` (inclusive) to ``until_ps``."""

    rule_id: str
    owner: str
    effect: effects.Effect
    where: Where = Where()
    start_ps: int = 0
    until_ps: int = NEVER_PS

    def __post_init__(self) -> None:
        if not 0 <= self.start_ps < self.until_ps <= NEVER_PS:
            right = f"an instant after the start at {self.start_ps} ps, neither before 0"
            raise _input_error(self.rule_id, key="until_ps", value=self.until_ps, expected=right)

    @property
    def kind(self) -> str:
        return str(self.effect.__struct_config__.tag)

    def in_force(self, now_ps: int) -> bool:
        return self.start_ps <= now_ps < self.until_ps


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of a frame. Of a lost one only ``rate_num / rate_den`` still has a meaning."""

    drop: bool = False
    dropped_by: str | None = None
    """The rule that lost it, for the record."""
    delay_ps: int = 0
    """Added between egress and ingress."""
    rate_num: int = 1
    rate_den: int = 1
    corrupt: bool = False
    copies: int = 1
    """How many arrive: 0 of a lost frame, 1, or more if doubled."""


PASS = Outcome()


class Switched(Protocol):
    """A machine, as far as rules need it: how many switches it has."""

    @property
    def subplanes(self) -> int: ...
    @property
    def l2_chips_per_subplane(self) -> int: ...


class Switches(msgspec.Struct, frozen=True, kw_only=True):
    """How many sub-planes and L2 chips share a UB frame (paper 1.3: 7 sub-planes of 16 chips)."""

    subplanes: int = 7
    chips_per_subplane: int = 16

    @staticmethod
    def of(machine: Switched) -> Switches:
        """Those of a machine."""
        return Switches(
            subplanes=machine.subplanes, chips_per_subplane=machine.l2_chips_per_subplane
        )

    def check(self, effect: effects.Effect) -> None:
        """Raises InputError for a sub-plane or chip that is not there."""
        for key, count in (("subplane", self.subplanes), ("chip", self.chips_per_subplane)):
            index = getattr(effect, key, 0)
            if index >= count:
                right = f"a number from 0 to {count - 1}"
                raise InputError(file="rule", key=key, value=index, expected=right)


CLOUDMATRIX = Switches()


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """A rule as people see it, with what it did in this process."""

    rule: Rule
    in_force: bool
    frames_matched: int
    frames_hit: int


class _Live:
    """A rule in the table and its counters. ``decide`` is None for kinds that only set the rate."""

    __slots__ = ("decide", "frames_hit", "frames_matched", "rule", "state")

    def __init__(self, rule: Rule, draws: verdicts.Draws) -> None:
        self.rule = rule
        self.state = verdicts.RuleState(draws, rule.start_ps)
        self.decide = verdicts.VERDICTS.get(type(rule.effect))
        self.frames_matched = 0
        self.frames_hit = 0

    def hits(self, tally: verdicts.Tally, now_ps: int) -> bool:
        self.frames_matched += 1
        hit = self.decide is None or self.decide(self.rule.effect, self.state, tally, now_ps)
        self.frames_hit += hit
        return hit


class _Path(msgspec.Struct, frozen=True, kw_only=True):
    """The rules in force on one path between two edges of leases, and the rate they make."""

    from_ps: int
    until_ps: int
    live: tuple[_Live, ...]
    rate: Fraction


class Rules:
    """The rule table of one process. ``draw`` gives the stream of a name from its beginning."""

    def __init__(
        self, draw: Callable[[str], verdicts.Draws], *, switches: Switches = CLOUDMATRIX
    ) -> None:
        self._draw = draw
        self._switches = switches
        self._live: dict[str, _Live] = {}
        self._paths: dict[FrameFacts, _Path] = {}
        self._last_until_ps = 0

    def idle(self, now_ps: int) -> bool:
        """True when no rule is in force now or later: the caller need not ask."""
        return now_ps >= self._last_until_ps

    def add(self, rule: Rule) -> None:
        """Put a rule last. Raises InputError for an id that is taken or a switch that is not there.

        An id that was removed may come again; its stream then begins anew.
        """
        if rule.rule_id in self._live:
            right = "an id that no rule has (change or remove that one)"
            raise _input_error(rule.rule_id, key="rule_id", value=rule.rule_id, expected=right)
        self._switches.check(rule.effect)
        self._live[rule.rule_id] = _Live(rule, self._draw(f"rule.{rule.rule_id}"))
        self._table_changed()

    def remove(self, rule_id: str) -> bool:
        """Take a rule out; other rules keep their streams and states. False if it was not there.

        To stop twice, or what never began, is no error.
        """
        removed = self._live.pop(rule_id, None) is not None
        self._table_changed()
        return removed

    def change(self, rule_id: str, **parameters: int | Fraction) -> Rule:
        """Set some parameters of a rule's effect; the others, its place and its stream stay.

        Raises InputError for an unknown rule or parameter, and for a value out of its range.
        """
        live = self._find(rule_id)
        effect = live.rule.effect
        for key, value in parameters.items():
            _check_parameter(live.rule, key=key, value=value)
        changed: Any = msgspec.structs.replace(effect, **parameters)
        return self._put(live, msgspec.structs.replace(live.rule, effect=changed))

    def renew(self, rule_id: str, *, until_ps: int) -> Rule:
        """Move the end of a rule's lease. Raises InputError for an unknown rule or a wrong end."""
        live = self._find(rule_id)
        return self._put(live, msgspec.structs.replace(live.rule, until_ps=until_ps))

    def listing(self, now_ps: int) -> tuple[Listed, ...]:
        """Every rule whose lease is not over, in the order in which they are asked."""
        return tuple(
            Listed(
                rule=live.rule,
                in_force=live.rule.in_force(now_ps),
                frames_matched=live.frames_matched,
                frames_hit=live.frames_hit,
            )
            for live in self._live.values()
            if now_ps < live.rule.until_ps
        )

    def judge(self, facts: FrameFacts, now_ps: int) -> Outcome:
        """What the rules in force make of a frame whose egress starts now. Draws: ask once."""
        path = self._paths.get(facts)
        if path is None or not path.from_ps <= now_ps < path.until_ps:
            path = self._paths[facts] = self._path(facts, now_ps)
        if not path.live:
            return PASS
        return _ask(path, now_ps)

    def _path(self, facts: FrameFacts, now_ps: int) -> _Path:
        reach = [live for live in self._live.values() if _reaches(live.rule, facts)]
        edges = [edge for live in reach for edge in (live.rule.start_ps, live.rule.until_ps)]
        in_force = tuple(live for live in reach if live.rule.in_force(now_ps))
        return _Path(
            from_ps=max((edge for edge in edges if edge <= now_ps), default=0),
            until_ps=min((edge for edge in edges if edge > now_ps), default=NEVER_PS),
            live=in_force,
            rate=self._rate([live.rule.effect for live in in_force], facts.crosses_nodes),
        )

    def _rate(self, in_force: list[effects.Effect], crosses_nodes: bool) -> Fraction:
        share = _share_up(in_force, self._switches, crosses_nodes=crosses_nodes)
        for effect in in_force:
            if isinstance(effect, effects.Rate):
                share *= effect.factor
        return share

    def _find(self, rule_id: str) -> _Live:
        if rule_id not in self._live:
            ids = ", ".join(self._live) or "none"
            right = f"the id of a rule that is here: {ids}"
            raise _input_error(rule_id, key="rule_id", value=rule_id, expected=right)
        return self._live[rule_id]

    def _put(self, live: _Live, rule: Rule) -> Rule:
        self._switches.check(rule.effect)
        live.rule = rule
        self._table_changed()
        return rule

    def _table_changed(self) -> None:
        self._paths.clear()
        ends_ps = (live.rule.until_ps for live in self._live.values())
        self._last_until_ps = max(ends_ps, default=0)


def make_rules(machine: Switched, *, seed: int, process: int, rules: Iterable[Rule]) -> Rules:
    """The table of one process of a machine, with these rules in it. Raises InputError as ``add``."""
    table = Rules(
        lambda name: entropy.stream(seed, f"process {process}.{name}"),
        switches=Switches.of(machine),
    )
    for rule in rules:
        table.add(rule)
    return table


def _ask(path: _Path, now_ps: int) -> Outcome:
    """Ask the rules in order until one drops the frame."""
    if not path.rate:
        return Outcome(drop=True, dropped_by=path.live[-1].rule.rule_id, copies=0)
    tally = verdicts.Tally()
    for live in path.live:
        live.hits(tally, now_ps)
        if tally.drop:
            break
    return Outcome(
        drop=tally.drop,
        dropped_by=live.rule.rule_id if tally.drop else None,
        delay_ps=0 if tally.drop else tally.delay_ps,
        rate_num=path.rate.numerator,
        rate_den=path.rate.denominator,
        corrupt=tally.corrupt and not tally.drop,
        copies=0 if tally.drop else tally.copies,
    )


def _share_up(
    in_force: list[effects.Effect], switches: Switches, *, crosses_nodes: bool
) -> Fraction:
    """What is up of the switches that share a frame, counted as a set: nothing is down twice."""
    down = {effect.subplane for effect in in_force if isinstance(effect, effects.SubplaneDown)}
    chips = {
        (effect.subplane, effect.chip)
        for effect in in_force
        if isinstance(effect, effects.L2Down) and effect.subplane not in down
    }
    if not crosses_nodes:
        return Fraction(switches.subplanes - len(down), switches.subplanes)
    total = switches.subplanes * switches.chips_per_subplane
    return Fraction(total - len(down) * switches.chips_per_subplane - len(chips), total)


def _reaches(rule: Rule, facts: FrameFacts) -> bool:
    if not rule.where.reaches(facts):
        return False
    if isinstance(rule.effect, effects.L2Down):
        return facts.uses_subplanes and facts.crosses_nodes
    return facts.uses_subplanes or not isinstance(rule.effect, effects.SubplaneDown)


def _check_parameter(rule: Rule, *, key: str, value: object) -> None:
    keys = rule.effect.__struct_fields__
    if key not in keys:
        right = f"one of the parameters of {rule.kind}: {', '.join(keys) or 'it has none'}"
        raise _input_error(rule.rule_id, key=key, value=value, expected=right)


def _input_error(rule_id: str, *, key: str, value: object, expected: str) -> InputError:
    return InputError(file=f"rule {rule_id}", key=key, value=value, expected=expected)
