"""Generated twins of the public traces: a workload written in either format.

They stand in where the published files are not at hand (``CMNET_TRACES`` unset), so the readers are
always tested.
"""

from __future__ import annotations

import datetime
from pathlib import Path

import msgspec

from nodes.serving.workload import Workload

ORIGIN = datetime.datetime(2023, 11, 16, 23, 59, 59)
"""Just before midnight: the day changes within the twin."""


def write_mooncake(path: Path, workload: Workload) -> Path:
    """Arrivals are cut to whole milliseconds, all the format holds."""
    rows = [
        msgspec.json.encode(
            {
                "timestamp": request.arrival_ps // 10**9,
                "input_length": request.input_tokens,
                "output_length": request.output_tokens,
                "hash_ids": request.hash_ids,
            }
        )
        for request in workload.requests
    ]
    path.write_bytes(b"\n".join(rows) + b"\n")
    return path


def write_azure(path: Path, workload: Workload) -> Path:
    """Arrivals are cut to 7 decimals; CRLF, as published."""
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for request in workload.requests:
        seconds, rest_ps = divmod(request.arrival_ps, 10**12)
        instant = ORIGIN + datetime.timedelta(seconds=seconds)
        text = f"{instant:%Y-%m-%d %H:%M:%S}.{rest_ps // 10**5:07d}"
        rows.append(f"{text},{request.input_tokens},{request.output_tokens}")
    path.write_bytes("\r\n".join([*rows, ""]).encode())
    return path
