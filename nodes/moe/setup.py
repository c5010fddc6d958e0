"""What a ``moe`` run is on a machine: which dies are its ranks, what it holds in memory, or why it cannot be.

Owns the way from options to a ``MoeJob``, the check against HBM, and ``moe.json`` of a run's folder, from
which verifier and report know what was to be done. Does not own the options' shapes (``options``), the
formulas of buffers (``buffers``) nor the rules of placement (``placement``).
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from cmnet.launch import options as values
from cmnet.record import record as records
from cmnet.topology.machine import Machine
from cmnet.units import format_bytes
from nodes.constants import EXPERT_WEIGHTS
from nodes.model import exact_skew, tiles
from nodes.moe import buffers, placement
from nodes.moe import options as moe_options
from nodes.moe.job import MoeJob
from nodes.moe.options import Options
from nodes.serving.settings import ServingSettings
from nodes.settings import ModelSettings

FILE = "moe.json"


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """What a die holds, in charged bytes. Attention weights, KV and the rest are not counted."""

    dispatch_buffer_bytes: int
    combine_buffer_bytes: int
    combine_touched_bytes: int
    """What the slot rule (token, k) can write of the combine buffer."""
    expert_slots: int
    """Experts whose weights a die holds, a layer."""
    weights_bytes: int
    hbm_bytes: int
    """Of the die."""

    @property
    def used_bytes(self) -> int:
        return self.dispatch_buffer_bytes + self.combine_buffer_bytes + self.weights_bytes


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """A run as its folder has it."""

    job: MoeJob
    fingerprint: str
    """Of the model."""
    nodes: tuple[str, ...]
    """Names of the nodes that have ranks, in the order of ranks."""
    node_of_rank: tuple[int, ...]
    """Index in ``nodes``."""
    die_of_rank: tuple[str, ...]
    engine_start_ps: int
    """Of the engine that writes."""
    memory: Memory
    verify: bool = True


def make_job(machine: Machine, options: Options) -> MoeJob:
    """The job of these options. Raises InputError that names option, value and what would be right."""
    model, serving = machine.sections["model"], machine.sections["serving"]
    assert isinstance(model, ModelSettings) and isinstance(serving, ServingSettings)
    dies = ranked_dies(machine)
    ep_size = _ep_size(machine, options, len(dies))
    shared_ranks, redundant = _shape(options, model, ep_size)
    job = MoeJob(
        devices=tuple(dies[:ep_size]),
        batch=options.batch,
        counts=moe_options.counts(options.counts, ep_size=ep_size, batch=options.batch),
        steps=2 if options.eplb else 1,
        algo=options.algo,
        engine=options.engine,
        skew=options.skew,
        eplb=options.eplb,
        isolated=options.isolated,
        redundant=redundant,
        shared_ranks=shared_ranks,
        body=options.model,
        model=_layers(machine, model, options),
        scale=_scale(options, model),
        timeout_ps=serving.step_timeout.amount,
    )
    _check_placement(job)
    _check_eplb(job)
    _check_skew(job)
    _check_memory(machine, job)
    return job


def ranked_dies(machine: Machine) -> list[int]:
    """Dies in the order of ranks: those of the decode role's nodes, then the rest."""
    decode = list(machine.roles.decode)
    others = [node for node in range(machine.nodes_count) if node not in decode]
    return [die for node in (*decode, *others) for die in machine.dies(node)]


def memory(machine: Machine, job: MoeJob) -> Memory:
    """What each die of the job holds."""
    model = job.model
    slots = experts_per_die(job)
    held = slots if job.shared_ranks else slots + 1  # the shared expert of its own tokens
    loaded = held + 1 if job.eplb else held  # weights that are fetched before a slot is free
    slots_per_token = model.top_k + 1 if job.shared_ranks else model.top_k
    ep_size, batch = job.ep_size, job.batch
    return Memory(
        dispatch_buffer_bytes=buffers.dispatch_buffer_bytes(
            ep_size=ep_size, batch=batch, experts_per_die=slots, model=model
        ),
        combine_buffer_bytes=buffers.combine_buffer_bytes(
            ep_size=ep_size, batch=batch, experts_per_die=slots, model=model
        ),
        combine_touched_bytes=buffers.combine_touched_bytes(
            batch=job.batch, slots_per_token=slots_per_token, model=model
        ),
        expert_slots=loaded,
        weights_bytes=model.carried_layers * loaded * int(EXPERT_WEIGHTS.value),
        hbm_bytes=machine.hbm_bytes_per_die,
    )


def experts_per_die(job: MoeJob) -> int:
    """Slots for routed experts of a die."""
    return -(-(job.model.routed_experts + job.redundant) // (job.ep_size - job.shared_ranks))


def told(machine: Machine, job: MoeJob, *, fingerprint: str, verify: bool) -> Told:
    """What is written for those who read the folder."""
    devices = [machine.devices[device] for device in job.devices]
    names = [machine.processes[device.process].name for device in devices]
    order = tuple(dict.fromkeys(names))
    return Told(
        job=job,
        fingerprint=fingerprint,
        nodes=order,
        node_of_rank=tuple(order.index(name) for name in names),
        die_of_rank=tuple(device.name for device in devices),
        engine_start_ps=machine.engines[job.engine].start_ps,
        memory=memory(machine, job),
        verify=verify,
    )


def write_told(folder: Path, told: Told) -> None:
    """Write ``moe.json``, whole or not at all."""
    draft = folder / f"{FILE}.draft"
    draft.write_bytes(msgspec.json.encode(told))
    draft.replace(folder / FILE)


def read_told(folder: Path) -> Told:
    """``moe.json`` of a run's folder. Raises InputError."""
    return records.decoded(folder / FILE, Told, expected="what a moe run wrote at its start")


# --- checks --------------------------------------------------------------------------------------


def _ep_size(machine: Machine, options: Options, dies: int) -> int:
    if options.ep is None:
        return len(machine.roles.decode) * machine.dies_per_node or dies
    if options.ep > dies:
        raise values.wrong("--ep", options.ep, f"at most {dies}, the dies of {machine.file}")
    return options.ep


def _shape(options: Options, model: ModelSettings, ep_size: int) -> tuple[int, int]:
    """Ranks for the shared expert, and slots for replicas. The deployment of the paper (320 dies: 256
    routed, 32 shared, 32 redundant; arXiv 2506.12708, section on decode) is taken at its size."""
    eighth, asked = model.routed_experts // 8, options.redundant
    if ep_size != model.routed_experts + 2 * eighth:
        return 0, asked or 0
    if asked not in (None, eighth):
        what = f"{model.routed_experts} routed, {eighth} shared and {eighth} redundant, one a die"
        raise values.wrong("--redundant", asked, f"{eighth}, as EP {ep_size} is deployed: {what}")
    return eighth, eighth


def _layers(machine: Machine, model: ModelSettings, options: Options) -> ModelSettings:
    if options.layers > model.moe_layers:
        most = f"at most {model.moe_layers}, the MoE layers of {machine.file}"
        raise values.wrong("--layers", options.layers, most)
    return msgspec.structs.replace(model, carried_layers=options.layers)


def _scale(options: Options, model: ModelSettings) -> tiles.Scale:
    try:
        return tiles.parse_scale(options.scale, model, exact=options.model == "exact")
    except ValueError as error:
        raise values.wrong("--scale", options.scale, str(error)) from None


def _check_placement(job: MoeJob) -> None:
    try:
        placement.initial(
            experts=job.model.routed_experts,
            ep_size=job.ep_size,
            redundant=job.redundant,
            shared_ranks=job.shared_ranks,
        )
    except ValueError as error:
        value = f"{job.ep_size} with --redundant {job.redundant}"
        raise values.wrong("--ep", value, f"ranks that all hold as much: {error}") from None


def _check_eplb(job: MoeJob) -> None:
    """While experts move, each needs a place where it is; so some slot must not hold an only replica."""
    if not job.eplb or job.redundant:
        return
    ranks = job.ep_size - job.shared_ranks
    right = f"{ranks} or a multiple of it: without a slot for a replica, --eplb on can move nothing"
    raise values.wrong("--redundant", job.redundant, right)


def _check_skew(job: MoeJob) -> None:
    if job.skew == "uniform":
        return
    try:
        exact_skew.wanted(job.model, job.skew)
    except ValueError as error:
        raise values.wrong("--skew", job.skew, str(error)) from None


def _check_memory(machine: Machine, job: MoeJob) -> None:
    held = memory(machine, job)
    if held.used_bytes <= held.hbm_bytes:
        return
    buffer_bytes = held.dispatch_buffer_bytes + held.combine_buffer_bytes
    layers = job.model.carried_layers
    needs = (
        f"{format_bytes(buffer_bytes)} of buffers (EP {job.ep_size}, batch {job.batch}) and"
        f" {format_bytes(held.weights_bytes)} of weights ({layers} layers x {held.expert_slots}"
        f" experts) = {held.used_bytes} B a die"
    )
    right = f"what fits into its {held.hbm_bytes} B of HBM (machine.hbm_per_die), not {needs}"
    if buffer_bytes > held.hbm_bytes:
        raise values.wrong("--batch", job.batch, right)
    raise values.wrong("--layers", layers, right)
