"""Options of serve: defaults, exact values, and a record that holds them."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cmnet.errors import InputError
from nodes.serving import options
from nodes.serving.decoding import PLAIN, Decoding
from nodes.settings import ModelSettings

DEFAULTS: dict[str, Any] = dict.fromkeys(options.NAMES) | {
    "rate": "1",
    "seed": "0",
    "scale": "64",
    "model": "seal",
    "moe": "full",
    "scheduler": "peer",
    "start_order": "listed",
    "socket_buffer": "4MiB",
    "journal": False,
    "microbatch": "off",
    "mtp": "0",
}


def test_defaults_are_those_of_the_struct() -> None:
    """Two places say them; they must not part."""
    assert options.parse(DEFAULTS) == options.Options()


def test_values_are_kept_exactly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The rate as a fraction, the trace where it is found from anywhere."""
    monkeypatch.chdir(tmp_path)
    given = {"rate": "1/3", "trace": "t.jsonl", "requests": "7", "socket_buffer": "4KiB"}
    asked = options.parse(DEFAULTS | given)
    assert asked.speed_up == Fraction(1, 3)
    assert asked.trace == str(tmp_path / "t.jsonl")
    assert (asked.requests, asked.socket_buffer_bytes) == (7, 4096)


def test_drafts_are_asked_for_as_they_are_made() -> None:
    """The chance as it was written, and the seed of the run for its coins."""
    given = {"mtp": "1", "accept": "0.65", "mtp_graphs": "naive", "microbatch": "on", "seed": "5"}
    decoding = options.parse(DEFAULTS | given).decoding
    assert decoding == Decoding(microbatch="on", drafts=1, accept="0.65", graphs="naive", seed=5)
    assert (decoding.chance, decoding.queries, decoding.parts) == (Fraction(13, 20), 2, 2)
    assert options.parse(DEFAULTS).decoding == PLAIN


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"accept": "0.5"}, "--accept: .* --mtp 1"),
        ({"mtp_graphs": "fused"}, "--mtp-graphs: .* --mtp 1"),
        ({"mtp": "2"}, "--mtp: .* 0 or 1"),
        ({"mtp": "1", "accept": "1.01"}, "--accept: .* from 0 to 1"),
        ({"mtp": "1", "accept": "-1"}, "--accept"),
        ({"mtp": "1", "mtp_graphs": "x"}, "--mtp-graphs: .* fused or naive"),
        ({"microbatch": "yes"}, "--microbatch: .* on or off"),
    ],
)
def test_what_no_step_can_do_is_refused(given: dict[str, str], expected: str) -> None:
    """Nothing is ignored: a chance without drafts would look as if it had been taken."""
    with pytest.raises(InputError, match=expected):
        options.parse(DEFAULTS | given)


def test_a_record_holds_them() -> None:
    """A replay takes the very same options."""
    asked = options.Options(seed=2**63 - 1, rate="1/3", requests=3)
    assert options.recorded(msgspec.json.decode(msgspec.json.encode(asked))) == asked
    with pytest.raises(InputError, match="options"):
        options.recorded({"seed": "x"})


def test_a_scale_is_of_a_model() -> None:
    """A full vector has the model's size."""
    assert options.scale("full", ModelSettings()).vector.item_bytes == 7680
    with pytest.raises(InputError, match="--scale"):
        options.scale("65", ModelSettings())


def test_what_is_not_built_is_refused_by_name() -> None:
    """None of them is ignored."""
    options.refuse_later(dict.fromkeys(options.LATER))
    for name in options.LATER:
        with pytest.raises(InputError, match=rf"^--{name.replace('_', '-')}: .* not built yet"):
            options.refuse_later({name: "1"})
