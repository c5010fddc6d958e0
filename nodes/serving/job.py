"""What one serving run is: workload, settings and scale, the same object in every process."""

from __future__ import annotations

import msgspec

from cmnet.topology.machine import Machine
from nodes.model import bodies
from nodes.model.tiles import Scale
from nodes.serving.decoding import PLAIN, Decoding
from nodes.serving.settings import ServingSettings
from nodes.serving.workload import Workload
from nodes.settings import ModelSettings


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A serving run."""

    workload: Workload
    model: ModelSettings
    serving: ServingSettings
    scale: Scale
    body: bodies.Name = "seal"
    decoding: Decoding = PLAIN


def make_job(
    machine: Machine,
    workload: Workload,
    scale: Scale,
    body: bodies.Name = "seal",
    decoding: Decoding = PLAIN,
) -> Job:
    """A job with the settings of the machine's ``model:`` and ``serving:`` sections.

    The machine must have been loaded with ``EXTENSIONS``.
    """
    model, serving = machine.sections["model"], machine.sections["serving"]
    assert isinstance(model, ModelSettings) and isinstance(serving, ServingSettings)
    return Job(
        workload=workload,
        model=model,
        serving=serving,
        scale=scale,
        body=body,
        decoding=decoding,
    )


EXTENSIONS: dict[str, type[msgspec.Struct]] = {"model": ModelSettings, "serving": ServingSettings}
"""Sections of a topology file that the serving system adds to the emulator's own."""
