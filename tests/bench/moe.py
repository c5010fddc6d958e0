"""What a layer of ``run.py moe`` costs: the command as a user runs it, its own report read."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

LAYERS = 4
EP_SIZE, BATCH = 320, 96
"""The published deployment: 30,720 tokens a layer."""
PAIRS = 20 * 19
"""Of nodes that exchange."""


def run(*, layers: int = LAYERS, scale: str = "64") -> dict[str, Any]:
    """The report of one run; every token verified."""
    with tempfile.TemporaryDirectory() as folder:
        sizes = ["--ep", str(EP_SIZE), "--batch", str(BATCH), "--layers", str(layers)]
        command = [sys.executable, "run.py", "moe", *sizes, "--scale", scale, "--json"]
        command += ["--out", str(Path(folder) / "run")]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report: dict[str, Any] = json.loads(ended.stdout)
    assert report["verified"] == {"checked": layers * EP_SIZE * BATCH, "wrong": 0}
    return report


def carried_bytes(report: dict[str, Any]) -> int:
    """What crossed sockets, or would have: in-node messages are counted too."""
    (plane,) = [row for row in report["rows"] if row["table"] == "planes" and row["name"] == "UB"]
    carried: int = plane["carried_bytes"]
    return carried
