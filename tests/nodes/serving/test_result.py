"""Lines of the gateway: read whole, in the order of requests."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from cmnet.errors import InputError
from nodes.serving import result
from tests.nodes.serving import answers


def test_results_are_read_in_the_order_of_requests(tmp_path: Path) -> None:
    """They are written as requests end; a line that was not finished does not count."""
    lines = [msgspec.json.encode(answers.right(index)) for index in (1, 0)]
    (tmp_path / result.REQUESTS).write_bytes(b"\n".join([*lines, b'{"index": 7']))
    assert result.read(tmp_path) == [answers.right(0), answers.right(1)]


def test_a_run_without_results_has_none(tmp_path: Path) -> None:
    """It ended before the first."""
    assert result.read(tmp_path) == []


def test_a_line_of_something_else_is_refused(tmp_path: Path) -> None:
    """With its number."""
    (tmp_path / result.REQUESTS).write_bytes(b"{}\n")
    with pytest.raises(InputError, match="line 1"):
        result.read(tmp_path)


def test_what_was_served_is_read_as_written(tmp_path: Path) -> None:
    """The verifier takes from it what was asked, a replay the digest of the trace."""
    result.write_serving(tmp_path, answers.SERVING)
    assert result.read_serving(tmp_path) == answers.SERVING
    with pytest.raises(InputError, match=r"serving\.json"):
        result.read_serving(tmp_path / "elsewhere")
