"""Rows of the public traces, served whole on the mini machine; and of twins that are always there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from nodes.model.tiles import parse_scale
from nodes.serving import workload
from nodes.serving.job import Job, make_job
from nodes.serving.workload import Workload
from nodes.settings import ModelSettings
from tests.nodes.serving import local, twins
from tests.nodes.serving.local import Served

pytestmark = pytest.mark.slow

MACHINE = local.mini()
ROWS, TWIN_ROWS = 8, 4
MOONCAKE = "mooncake_synthetic.jsonl"
AZURE = "azure_llm_2023_code.csv"


def published(name: str) -> Path:
    folder = os.environ.get("CMNET_TRACES")
    if folder is None:
        pytest.skip("CMNET_TRACES is not set to a folder with the published traces")
    return Path(folder, name)


def serve(trace: Path, folder: Path) -> tuple[Job, Served]:
    """The first rows, every answer verified."""
    model = MACHINE.sections["model"]
    assert isinstance(model, ModelSettings)
    rows = workload.read_trace(
        trace, max_tokens=model.max_tokens, block_tokens=model.block_tokens, requests=ROWS
    )
    job = make_job(MACHINE, rows, parse_scale("64", model))
    return job, local.serve(MACHINE, job, folder)


def check(job: Job, served: Served) -> None:
    """All of them end well: each output token is checked and right."""
    requests = job.workload.requests
    assert [r["status"] for r in served.requests] == ["ok"] * len(requests) and requests
    assert served.wrong == 0, served.first
    assert served.checked == sum(request.output_tokens for request in requests)


def hits(served: Served) -> int:
    return sum(record["blocks_hit"] for record in served.requests)


def test_published_mooncake_rows(tmp_path: Path) -> None:
    check(*serve(published(MOONCAKE), tmp_path))


def test_published_azure_rows(tmp_path: Path) -> None:
    """Nothing is shared there, so nothing may hit."""
    job, served = serve(published(AZURE), tmp_path)
    check(job, served)
    assert hits(served) == 0


def generated() -> Workload:
    model = MACHINE.sections["model"]
    assert isinstance(model, ModelSettings)
    return workload.generate(
        seed=8, max_tokens=model.max_tokens, block_tokens=model.block_tokens, requests=TWIN_ROWS
    )


@pytest.mark.parametrize(
    ("write", "hit"), [(twins.write_mooncake, True), (twins.write_azure, False)]
)
def test_rows_of_a_twin(write: Callable[[Path, Workload], Path], hit: bool, tmp_path: Path) -> None:
    """Prefixes are found in the one format and never in the other, which has no names for them."""
    job, served = serve(write(tmp_path / "twin", generated()), tmp_path)
    check(job, served)
    assert bool(hits(served)) == hit
