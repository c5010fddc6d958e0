"""The options of ``serve``: texts to checked values.

Owns which values each option takes, which are not built yet, and their defaults. Does not own their
names on the command line (``run.py``) nor the files that they name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Literal, cast

import msgspec

from cmnet.launch import options
from nodes.model import tiles
from nodes.serving.cost import Microbatch
from nodes.serving.decoding import Decoding, Graphs
from nodes.settings import ModelSettings

GENERATED_REQUESTS = 40
"""Requests of a generated workload unless said (design 5)."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What a serving run was asked for; its record holds it."""

    trace: str | None = None
    requests: int | None = None
    """None: all rows of the trace, or 40 generated."""
    rate: str = "1"
    """An exact number as text, such as 0.5 or 1/3."""
    plan: str | None = None
    seed: int = 0
    scale: str = "64"
    model: Literal["exact", "seal"] = "seal"
    """Also of records from before there were two."""
    start_order: Literal["listed", "random", "reverse"] = "listed"
    socket_buffer_bytes: int = 4 << 20
    journal: bool = False
    out: str | None = None
    microbatch: Microbatch = "off"
    mtp: int = 0
    accept: str = "0.7"
    """An exact number as text, 0 to 1."""
    mtp_graphs: Graphs = "fused"

    @property
    def decoding(self) -> Decoding:
        """How decode goes about its steps."""
        return Decoding(
            microbatch=self.microbatch,
            drafts=self.mtp,
            accept=self.accept,
            graphs=self.mtp_graphs,
            seed=self.seed,
        )

    @property
    def speed_up(self) -> Fraction:
        """``rate`` as a number."""
        return options.positive(self.rate, option="--rate")


NAMES = (
    *("trace", "requests", "rate", "plan", "seed", "scale", "model", "moe", "start_order"),
    *("socket_buffer", "journal", "out", "scheduler", "microbatch", "mtp", "accept", "mtp_graphs"),
)
"""What ``parse`` takes, as Python names."""

LATER = ("pace", "cache_plane", "kv", "attention", "eplb", "table")
"""Options of parts that are not built yet."""


def refuse_later(given: Mapping[str, Any]) -> None:
    """Raises InputError for the first option that has a value and no part behind it."""
    for name in LATER:
        if given.get(name) is not None:
            raise options.not_built(_flag(name), given[name])


def parse(given: Mapping[str, Any]) -> Options:
    """Options from the texts of the command line. Raises InputError that names the option."""
    model = options.choice(given["model"], option="--model", built=("exact", "seal"))
    options.choice(given["moe"], option="--moe", built=("full",), planned=("sampled", "modelled"))
    planned = ("locality",)
    options.choice(given["scheduler"], option="--scheduler", built=("peer",), planned=planned)
    order = options.choice(
        given["start_order"], option="--start-order", built=("listed", "random", "reverse")
    )
    options.positive(given["rate"], option="--rate")
    requests = given["requests"]
    return Options(
        trace=None if given["trace"] is None else _absolute(given["trace"], "--trace"),
        requests=None if requests is None else options.count(requests, option="--requests"),
        rate=given["rate"],
        plan=options.path(given["plan"], option="--plan"),
        seed=options.seed(given["seed"]),
        scale=given["scale"],
        model=cast(Literal["exact", "seal"], model),
        start_order=cast(Literal["listed", "random", "reverse"], order),
        socket_buffer_bytes=options.socket_buffer_bytes(given["socket_buffer"]),
        journal=given["journal"],
        out=options.path(given["out"], option="--out"),
        **_decoding(given),
    )


def _decoding(given: Mapping[str, Any]) -> dict[str, Any]:
    """Micro-batches and drafts. ``--accept`` and ``--mtp-graphs`` say something of drafts only."""
    built = ("on", "off")
    microbatch = options.choice(given["microbatch"], option="--microbatch", built=built)
    mtp = int(options.choice(given["mtp"], option="--mtp", built=("0", "1")))
    accept, graphs = given["accept"], given["mtp_graphs"]
    for name, value in (("--accept", accept), ("--mtp-graphs", graphs)):
        if value is not None and not mtp:
            raise options.wrong(name, value, "--mtp 1 beside it")
    found = {"microbatch": microbatch, "mtp": mtp}
    if accept is not None:
        _share(accept, option="--accept")
        found["accept"] = accept
    if graphs is not None:
        built = ("fused", "naive")
        found["mtp_graphs"] = options.choice(graphs, option="--mtp-graphs", built=built)
    return found


def recorded(data: object) -> Options:
    """Options of a record. Raises InputError."""
    try:
        return msgspec.convert(data, Options)
    except msgspec.ValidationError as error:
        raise options.wrong("record.json: options", str(error), "options of serve") from None


def scale(text: str, model: ModelSettings, *, exact: bool = False) -> tiles.Scale:
    """``--scale`` for this model. Raises InputError."""
    try:
        return tiles.parse_scale(text, model, exact=exact)
    except ValueError as error:
        raise options.wrong("--scale", text, str(error)) from None


def _share(text: str, *, option: str) -> None:
    """An exact number from 0 to 1."""
    expected = "a number from 0 to 1, such as 0.7"
    if text != "0" and options.positive(text, option=option) > 1:
        raise options.wrong(option, text, expected)


def _absolute(text: str, option: str) -> str:
    """A record must find the file again, wherever it is replayed."""
    options.path(text, option=option)
    return os.path.abspath(text)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
