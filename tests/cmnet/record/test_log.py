"""The run's log."""

from __future__ import annotations

import json
from pathlib import Path

from cmnet.record.log import FILE, Log


def test_each_event_is_one_object_with_its_instant_first(tmp_path: Path) -> None:
    """Lines are whole at once, so whoever follows the file sees an event when it happens."""
    log = Log(tmp_path)
    log.event("node_died", at_ps=12, node="node01", planned=True)
    lines = (tmp_path / FILE).read_text().splitlines()
    log.event("ended", at_ps=20)
    log.close()
    assert [list(json.loads(line).items()) for line in lines] == [
        [("at_ps", 12), ("node", "node01"), ("planned", True), ("event", "node_died")]
    ]
    assert len((tmp_path / FILE).read_text().splitlines()) == 2
