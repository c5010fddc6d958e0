"""Options of ``moe`` and what they mean on a machine: ranks, shapes, memory, and why something cannot be."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cmnet.errors import InputError
from nodes.moe import options, setup
from nodes.moe.job import MoeJob
from tests.nodes.moe import made_up
from tests.nodes.moe.made_up import machine

GIVEN = {**made_up.GIVEN, "ep": None, "batch": None, "layers": None}


def job(name: str = "cloudmatrix384", **changes: Any) -> MoeJob:
    return setup.make_job(machine(name), options.parse({**GIVEN, **changes}))


def refused(*parts: str, name: str = "cloudmatrix384", **changes: Any) -> None:
    with pytest.raises(InputError) as error:
        job(name, **changes)
    assert [part for part in parts if part not in str(error.value)] == [], str(error.value)


def test_without_options_it_is_the_deployment_of_the_paper() -> None:
    """EP 320, 96 tokens a die, one layer; 32 ranks for the shared expert, 32 redundant slots."""
    found = job()
    assert (found.ep_size, found.batch, found.model.carried_layers, found.steps) == (320, 96, 1, 1)
    assert (found.shared_ranks, found.redundant) == (32, 32)
    assert found.counts == (96,) * 320
    assert found.timeout_ps == 5 * 10**12


def test_ranks_lie_on_the_nodes_that_decode_first() -> None:
    """EP 8 is half of a node, EP 16 a node; then come the others, in their order."""
    whole = machine("cloudmatrix384")
    for ep, names in ((8, ["node12"]), (16, ["node12"]), (17, ["node12", "node13"])):
        redundant = str(-256 % ep)
        told = setup.told(whole, job(ep=str(ep), redundant=redundant), fingerprint="", verify=True)
        assert list(told.nodes) == names
        assert told.node_of_rank[:16] == (0,) * min(ep, 16)
    dies = setup.ranked_dies(whole)
    assert len(dies) == len(set(dies)) == 768
    assert whole.devices[dies[319]].name == "node31/npu7/die1"
    assert whole.devices[dies[320]].name == "node00/npu0/die0"


def test_ranks_of_a_machine_without_roles_are_all_its_dies() -> None:
    assert job("pair").ep_size == 2


def test_other_groups_are_contiguous_and_share_nothing_unless_asked() -> None:
    found = job(ep="256")
    assert (found.shared_ranks, found.redundant) == (0, 0)
    assert setup.experts_per_die(found) == 1
    found = job(ep="288", redundant="32")
    assert (found.shared_ranks, found.redundant, setup.experts_per_die(found)) == (0, 32, 1)
    assert setup.experts_per_die(job(ep="8")) == 32


def test_eplb_is_a_second_step() -> None:
    """And needs room for one more expert: weights are fetched before a slot is given up."""
    assert job(eplb="on").steps == 2
    plain, balanced = (setup.memory(machine("cloudmatrix384"), job(eplb=e)) for e in ("off", "on"))
    assert (plain.expert_slots, balanced.expert_slots) == (1, 2)


def test_the_published_example_of_buffers() -> None:
    """645 MiB a die: 225 + 420; and the slot rule touches 12.4 MB of the second."""
    held = setup.memory(machine("cloudmatrix384"), job(layers="2"))
    assert held.dispatch_buffer_bytes == 225 << 20
    assert held.combine_buffer_bytes == 420 << 20
    assert held.combine_touched_bytes == 96 * 9 * 14_336
    assert held.weights_bytes == 2 * 44_040_192
    assert held.used_bytes < held.hbm_bytes == 64 * 10**9


def test_what_does_not_fit_into_memory_is_refused_with_the_numbers() -> None:
    """33 experts a layer (32 and the shared one) are 1.45 GB: 43 layers fit beside the buffers."""
    assert job(ep="8", layers="43").model.carried_layers == 43
    refused(
        "--layers", "58", "64000000000 B of HBM", "58 layers x 33", "84.29 GB", ep="8", layers="58"
    )


REFUSED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"ep": "0"}, ("--ep", "'0'", "from 1 to 768")),
    ({"ep": "769"}, ("--ep", "'769'", "from 1 to 768")),
    ({"ep": "9"}, ("--ep", "9 with --redundant 0", "redundant replicas that can: 5")),
    ({"batch": "0"}, ("--batch", "'0'", "from 1 to 512")),
    ({"batch": "513"}, ("--batch", "'513'", "from 1 to 512")),
    ({"layers": "59"}, ("--layers", "'59'", "from 1 to 58")),
    ({"redundant": "16"}, ("--redundant", "16", "32, as EP 320 is deployed")),
    ({"skew": "hot"}, ("--skew", "'hot'", "'hot:K:X'")),
    ({"skew": "hot:9:30"}, ("--skew", "'hot:9:30'", "at most 256")),
    ({"skew": "zipf:x"}, ("--skew", "'zipf:x'", "'zipf:S'")),
    ({"skew": "zipf:1", "model": "seal"}, ("--skew", "'zipf:1'", "--model seal")),
    ({"model": "gpt"}, ("--model", "'gpt'", "exact or seal")),
    ({"algo": "fast"}, ("--algo", "'fast'", "fused or unfused")),
    ({"engine": "dma"}, ("--engine", "'dma'", "aiv or sdma")),
    ({"eplb": "yes"}, ("--eplb", "'yes'", "on or off")),
    ({"scale": "65"}, ("--scale", "'65'", "'full' or a multiple of 64")),
    ({"counts": "96"}, ("--counts", "'96'", "each of 320 ranks, not 1")),
    ({"counts": "97x320"}, ("--counts", "'97x320'", "at most --batch 96")),
    ({"counts": "9x0"}, ("--counts", "'9x0'", "for N ranks")),
    ({"counts": "a"}, ("--counts", "'a'", "a number of tokens")),
    ({"out": ""}, ("--out", "''", "folder")),
    ({"table": True, "ep": "8"}, ("--ep", "'8'", "--table")),
    ({"table": True, "eplb": "on"}, ("--eplb", "'on'", "--table")),
    ({"table": True, "plan": "x.yaml"}, ("--plan", "'x.yaml'", "--table")),
]


@pytest.mark.parametrize(("changes", "parts"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_bad_value_is_refused(changes: dict[str, Any], parts: tuple[str, ...]) -> None:
    """The option, its value, and what would be right; nothing is clamped."""
    refused(*parts, **changes)


def test_a_small_machine_has_room_for_its_dies_only() -> None:
    refused("--ep", "17", "at most 16", "mini.yaml", name="mini", ep="17")


def test_what_was_told_is_read_again(tmp_path: Any) -> None:
    """And a folder of another command is refused by its file."""
    told = made_up.told()
    setup.write_told(tmp_path, told)
    assert setup.read_told(tmp_path) == told
    (tmp_path / setup.FILE).write_text("{}")
    with pytest.raises(InputError, match=r"moe\.json"):
        setup.read_told(tmp_path)


def test_options_of_a_record_are_read_again() -> None:
    asked = options.parse({**GIVEN, "ep": "8", "counts": "1x8"})
    assert options.recorded(msgspec.to_builtins(asked)) == asked
    with pytest.raises(InputError, match="options of moe"):
        options.recorded({"batch": "many"})
