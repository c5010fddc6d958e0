"""A topology file with something changed, for the tests of the loader."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from cmnet.topology import document

TOPOLOGIES = Path(__file__).resolve().parents[3] / "topologies"

Write = Callable[[dict[str, Any]], str]


@pytest.fixture(scope="session")
def mini_data() -> dict[str, Any]:
    """mini.yaml with its base merged: every key of a topology, few devices."""
    return document.read(str(TOPOLOGIES / "mini.yaml")).data


@pytest.fixture
def changed(tmp_path: Path, mini_data: dict[str, Any]) -> Write:
    """Writes mini with changes {dotted key: value, or ... to leave it out}; returns the file."""

    def write(changes: dict[str, Any]) -> str:
        data = copy.deepcopy(mini_data)
        for key, value in changes.items():
            *above, last = document.parse_key(key)
            place: Any = data
            for step in above:
                place = place[step]
            if value is ...:
                del place[last]
            else:
                place[last] = value
        file = tmp_path / "changed.yaml"
        file.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
        return str(file)

    return write
