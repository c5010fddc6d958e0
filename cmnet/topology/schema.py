"""What a topology file may hold: frozen structs, one per mapping of the file.

Owns the keys, their meaning and the limits of each number. Does not own reading files
(``document``), rules between several keys (``checks``) or what they mean for a frame (``paths``).
Every number is a mapping ``{value, kind, source}``; a kind of ``assumed`` needs the ``range`` to
try.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

import msgspec

from cmnet.topology.quantity import NUMBERS, Count, Duration, FieldError, Number, Rate, Share, Size

EXTENSION_SECTIONS = ("model", "serving", "ems")
"""Top-level keys that a topology may carry for the programs on the machine; their structs are given
to ``load`` by the caller, because the emulator knows no LLM."""


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A mapping of the file: frozen, unknown keys refused."""


class MachineSection(_Section, frozen=True, kw_only=True):
    """What the machine is built of."""

    nodes: Count
    npus_per_node: Count
    dies_per_npu: Count
    cpus_per_node: Count
    hbm_per_die: Size


class Effective(_Section, frozen=True, kw_only=True):
    """One operation on one path, as measured."""

    rate: Rate
    """What one initiator reaches with large transfers."""
    latency: Duration
    """Completion of an operation of ``latency_bytes`` on an idle path."""


class Operations(_Section, frozen=True, kw_only=True):
    read: Effective
    write: Effective


class PathSection(_Section, frozen=True, kw_only=True):
    """Two sorts of device; within one node and between two."""

    intra: Operations
    inter: Operations


class PackageSection(_Section, frozen=True, kw_only=True):
    """The two dies of one NPU: a path of their own, which no switch is part of."""

    propagation: Duration
    rate: Rate
    line_rate: Rate


class EngineSection(_Section, frozen=True, kw_only=True):
    """What moves the data for a die."""

    start: Duration
    """Paid before the egress by each operation, beyond what the latencies include."""
    rate_share: Share
    """Of the path's effective rate."""


class EnginesSection(_Section, frozen=True, kw_only=True):
    aiv: EngineSection
    sdma: EngineSection


class UbRetrySection(_Section, frozen=True, kw_only=True):
    """The link layer's retry of a lost frame; after ``tries`` the operation fails."""

    tries: Count
    delay: Duration


class UbSection(_Section, frozen=True, kw_only=True):
    """The fabric inside the supernode, with memory semantics."""

    subplanes: Count
    l2_chips_per_subplane: Count
    link_rate: Rate
    """One die, one sub-plane; also one link from an L1 chip up to an L2 chip."""
    cpu_port_rate: Rate
    latency_bytes: Size
    """The size of the operations whose latency the paths below give."""
    same_npu: PackageSection
    npu_npu: PathSection
    npu_cpu: PathSection
    cpu_cpu: PathSection
    engines: EnginesSection
    retry: UbRetrySection
    chunk: Size
    """A bulk flow keeps one chunk in its port."""
    queue_max: Size
    """Bytes a port accepts waiting; beyond it a sender waits. Above one collective of one die."""
    bundle_slice: Duration
    """Egress time that a bundle of one collective may span: the grain at which rules act on it."""


class RdmaSection(_Section, frozen=True, kw_only=True):
    """RoCE, dies only, with verbs semantics."""

    port_rate: Rate
    propagation: Duration
    timeout: Duration
    tries: Count
    acknowledge_chunks: Count
    """A receiver acknowledges each message and each so many chunks of one."""
    chunk: Size
    queue_max: Size


class VpcSection(_Section, frozen=True, kw_only=True):
    """The control and storage network, one port per node and per further process."""

    port_rate: Rate
    propagation: Duration
    retransmit_timeout: Duration
    """Of the first try; doubled for each further one."""
    tries: Count
    window: Size
    chunk: Size
    queue_max: Size


class PlanesSection(_Section, frozen=True, kw_only=True):
    ub: UbSection
    rdma: RdmaSection
    vpc: VpcSection


class RolesSection(_Section, frozen=True, kw_only=True):
    """Who does what. Entries are node names, or spans such as ``node00..node11``."""

    prefill: tuple[tuple[str, ...], ...] = ()
    """One entry per instance."""
    decode: tuple[str, ...] = ()
    ems: tuple[str, ...] = ()
    gateway: bool = False
    """One further process, on the VPC plane only."""


class Topology(_Section, frozen=True, kw_only=True):
    """A whole file. Extension sections are taken off before this is read."""

    name: str
    about: str = ""
    machine: MachineSection
    planes: PlanesSection
    roles: RolesSection = RolesSection()

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise FieldError("name", "a name for this machine")


LIMITS: tuple[tuple[str, str, str], ...] = (
    ("machine.nodes", "1", "1024"),
    ("machine.npus_per_node", "1", "64"),
    ("machine.dies_per_npu", "1", "8"),
    ("machine.cpus_per_node", "1", "64"),
    ("machine.hbm_per_die", "1 MB", "1 TB"),
    ("planes.ub.subplanes", "1", "64"),
    ("planes.ub.l2_chips_per_subplane", "1", "256"),
    ("planes.ub.latency_bytes", "1 B", "64 KiB"),
    ("planes.ub.*.latency", "1 ns", "1 ms"),
    ("planes.ub.same_npu.propagation", "0 ps", "1 ms"),
    ("planes.*.propagation", "1 ps", "1 s"),
    ("planes.ub.engines.*.start", "0 ps", "1 ms"),
    ("planes.ub.engines.*.rate_share", "1 %", "100 %"),
    ("planes.ub.bundle_slice", "1 ns", "1 s"),
    ("planes.ub.retry.delay", "0 ps", "1 s"),
    ("planes.rdma.timeout", "1 us", "1 h"),
    ("planes.vpc.retransmit_timeout", "1 us", "1 h"),
    ("planes.*.tries", "1", "32"),
    ("planes.rdma.acknowledge_chunks", "1", "65536"),
    ("planes.vpc.window", "1 B", "1 GiB"),
    ("planes.*.chunk", "1 B", "1 GiB"),
    ("planes.*.queue_max", "1 B", "1 TiB"),
    ("planes.*rate", "1 Mbit/s", "10 TB/s"),
)
"""Key pattern, least, most; the first that matches counts. A mistyped unit or a few zeros too many
falls outside. Each number of a topology has one (a test walks the schema)."""


def numbers(section: msgspec.Struct, prefix: str = "") -> Iterator[tuple[str, Number]]:
    """Every number below ``section`` with its dotted key, in file order."""
    for field in msgspec.structs.fields(section):
        value = getattr(section, field.name)
        key = f"{prefix}{field.name}"
        if isinstance(value, NUMBERS):
            yield key, value
        elif isinstance(value, msgspec.Struct):
            yield from numbers(value, f"{key}.")


def limits_of(key: str) -> tuple[str, str]:
    """Least and most value of the number at this key."""
    return next((low, high) for pattern, low, high in LIMITS if fnmatchcase(key, pattern))


def check_limits(topology: Topology) -> None:
    """Raises FieldError for the first number outside its limits."""
    for key, number in numbers(topology):
        low, high = limits_of(key)
        if not number.parse(low) <= number.amount <= number.parse(high):
            raise FieldError(f"{key}.value", f"{low} to {high}")
