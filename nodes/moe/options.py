"""The options of ``moe``: texts to checked values.

Owns which values each option takes and their defaults. Does not own their names on the command line
(``run.py``) nor what they mean on a machine (``setup``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, cast

import msgspec

from cmnet.launch import options
from nodes.moe.job import Algo, EngineName

BATCH = 96
"""Tokens per die and call unless said: the paper's example of a buffer."""
BATCH_MAX = 512
"""Of the shipping operator (CANN, MoeDistributeDispatch: Bs at most 512)."""
LAYERS_MAX = 58
"""MoE layers of DeepSeek-R1: all but the first three."""
EP_MAX = 768
"""Dies of a supernode; the shipping operator takes no more either."""
REDUNDANT_MAX = 4096
"""16 replicas of each of 256 experts (assumed; any bound will do: memory refuses less, see ``setup``)."""

TABLE_MODEL = "seal"
"""Of ``--table`` unless said: its gate is uniformly random, token by token, as the published latencies are
taken to be. The exact model's has preferences (its weights, or the calibration of ``balanced``): the
busiest of 256 ranks has 1.6 times the mean instead of 1.1, and combine waits for it."""

_COUNT = re.compile(r"(\d{1,4})(?:x(\d{1,4}))?")


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What a run was asked for; its record holds it."""

    ep: int | None = None
    """None: all dies of the decode role, or of the machine where there is none."""
    batch: int = BATCH
    layers: int = 1
    table: bool = False
    isolated: bool = False
    """Each operator of all ranks begins at one instant, as it is measured alone; so in the table."""
    algo: Algo = "fused"
    engine: EngineName = "aiv"
    skew: str = "uniform"
    eplb: bool = False
    redundant: int | None = None
    """None: those of the deployment at its size, else 0."""
    counts: str | None = None
    """Tokens of each rank, such as ``0x7,96``; None: all have ``batch``."""
    model: Literal["exact", "seal"] = "exact"
    plan: str | None = None
    seed: int = 0
    scale: str = "64"
    verify: bool = True
    start_order: Literal["listed", "random", "reverse"] = "listed"
    socket_buffer_bytes: int = 4 << 20
    journal: bool = False
    out: str | None = None


NAMES = (
    *(
        "ep",
        "batch",
        "layers",
        "table",
        "isolated",
        "algo",
        "engine",
        "skew",
        "eplb",
        "redundant",
        "model",
    ),
    *("plan", "seed", "scale", "no_verify", "counts", "start_order", "socket_buffer", "journal"),
    "out",
)
"""What ``parse`` takes, as Python names."""

OF_ONE_RUN = {
    "ep": "--table has EP degrees itself",
    "batch": "--table has batches itself",
    "layers": "--table measures one layer",
    "redundant": "--table has every routed expert once",
    "counts": "--table gives all ranks as many tokens",
    "plan": "--table measures a machine without faults",
    "journal": "--table is many runs, a journal is of one",
    "eplb": "--table re-places no experts",
}
"""Options that mean nothing with ``--table``, and why."""


def parse(given: Mapping[str, Any]) -> Options:
    """Options from the texts of the command line. Raises InputError that names the option."""
    eplb = options.choice(given["eplb"], option="--eplb", built=("on", "off")) == "on"
    if given["table"]:
        _refuse_beside_table(given, eplb=eplb)
    asked = given["model"] or (TABLE_MODEL if given["table"] else "exact")
    model = options.choice(asked, option="--model", built=("exact", "seal"))
    if model == "seal" and given["skew"] != "uniform":
        raise options.wrong("--skew", given["skew"], "uniform, with --model seal: it has no biases")
    algo = options.choice(given["algo"], option="--algo", built=("fused", "unfused"))
    engine = options.choice(given["engine"], option="--engine", built=("aiv", "sdma"))
    order = options.choice(
        given["start_order"], option="--start-order", built=("listed", "random", "reverse")
    )
    batch = _count(given["batch"], "--batch", 1, BATCH_MAX)
    layers = _count(given["layers"], "--layers", 1, LAYERS_MAX)
    return Options(
        ep=_count(given["ep"], "--ep", 1, EP_MAX),
        batch=BATCH if batch is None else batch,
        layers=1 if layers is None else layers,
        table=given["table"],
        isolated=given["isolated"],
        algo=cast(Algo, algo),
        engine=cast(EngineName, engine),
        skew=given["skew"],
        eplb=eplb,
        redundant=_count(given["redundant"], "--redundant", 0, REDUNDANT_MAX),
        counts=given["counts"],
        model=cast(Literal["exact", "seal"], model),
        plan=options.path(given["plan"], option="--plan"),
        seed=options.seed(given["seed"]),
        scale=given["scale"],
        verify=not given["no_verify"],
        start_order=cast(Literal["listed", "random", "reverse"], order),
        socket_buffer_bytes=options.socket_buffer_bytes(given["socket_buffer"]),
        journal=given["journal"],
        out=options.path(given["out"], option="--out"),
    )


def recorded(data: object) -> Options:
    """Options of a record. Raises InputError."""
    try:
        return msgspec.convert(data, Options)
    except msgspec.ValidationError as error:
        raise options.wrong("record.json: options", str(error), "options of moe") from None


def counts(text: str | None, *, ep_size: int, batch: int) -> tuple[int, ...]:
    """Tokens of each rank: ``8,0x6,8`` is 8, six ranks with none, 8. Raises InputError.

    >>> counts("8,0x6,8", ep_size=8, batch=8)
    (8, 0, 0, 0, 0, 0, 0, 8)
    """
    if text is None:
        return (batch,) * ep_size
    found: list[int] = []
    for piece in text.split(","):
        match = _COUNT.fullmatch(piece)
        if match is None or int(match[2] or 1) == 0:
            raise options.wrong("--counts", piece, "a number of tokens, or one for N ranks: 96x3")
        if int(match[1]) > batch:
            raise options.wrong(
                "--counts", piece, f"at most --batch {batch}: a rank has no more places"
            )
        found += [int(match[1])] * int(match[2] or 1)
    if len(found) != ep_size:
        raise options.wrong(
            "--counts", text, f"a count for each of {ep_size} ranks, not {len(found)}"
        )
    return tuple(found)


def _refuse_beside_table(given: Mapping[str, Any], *, eplb: bool) -> None:
    said = {**given, "eplb": "on" if eplb else None}
    for name, why in OF_ONE_RUN.items():
        if said[name]:
            raise options.wrong(f"--{name}", said[name], f"it left out: {why}")


def _count(text: str | None, option: str, least: int, most: int) -> int | None:
    return None if text is None else options.count(text, option=option, least=least, most=most)
