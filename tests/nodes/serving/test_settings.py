"""The serving section: defaults hold, wrong values are named."""

from __future__ import annotations

import msgspec
import pytest

from nodes.serving.settings import ServingSettings


def test_every_default_is_within_its_own_limits() -> None:
    """A topology without the section gets them all."""
    assert msgspec.convert({}, ServingSettings) == ServingSettings()


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"step_timeout": "5 s"}, "step_timeout"),
        ({"patience": 3}, "patience"),
        (
            {"transfer_tries": {"value": 0, "kind": "published", "source": "x"}},
            "transfer_tries.value: expected more than 0",
        ),
        (
            {"ping_timeout": {"value": "1 s", "kind": "published", "source": "x"}},
            "ping_timeout.value: expected more than ping_interval, 1 s",
        ),
    ],
)
def test_a_wrong_section_is_refused_by_its_key(section: dict[str, object], message: str) -> None:
    """Never clamped, never ignored."""
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert(section, ServingSettings)
