"""The model section: R1's figures, and what is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from nodes.settings import ModelSettings


def test_defaults_are_deepseek_r1_as_the_paper_charges_it() -> None:
    settings = ModelSettings()
    assert settings.kv_bytes_per_token == 61 * (512 + 64) * 2
    assert settings.dispatch_bytes == settings.hidden + 512
    assert settings.combine_bytes == 2 * settings.hidden
    assert (settings.rows_per_block, settings.shared_expert) == (4, 256)


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("layers", {"layers": 60}),
        ("carried_layers", {"carried_layers": 59}),
        ("carried_layers", {"carried_layers": 0}),
        ("tokens_per_carried", {"tokens_per_carried": 100}),
        ("block_tokens", {"max_tokens": 256}),
        ("groups", {"groups": 7}),
        ("routed_experts", {"routed_experts": 8192}),
        ("top_groups", {"top_groups": 9}),
        ("top_k", {"top_k": 65}),
        ("top_k", {"top_k": 17, "routed_experts": 32}),
        ("shared_experts", {"shared_experts": 2}),
        ("vocabulary", {"vocabulary": 2**31}),
    ],
)
def test_a_wrong_value_is_refused_by_its_key(key: str, values: dict[str, Any]) -> None:
    """The loader turns the message into an InputError; the key must come first."""
    with pytest.raises(ValueError, match=f"^{key}: expected "):
        ModelSettings(**values)


def test_an_unknown_key_is_refused() -> None:
    """A misspelt key must not silently leave the default."""
    with pytest.raises(msgspec.ValidationError, match="carried_layer"):
        msgspec.convert({"carried_layer": 3}, ModelSettings)


def test_a_wrong_value_is_refused_when_read_from_a_file() -> None:
    with pytest.raises(msgspec.ValidationError, match="groups: expected a divisor"):
        msgspec.convert({"groups": 7}, ModelSettings)
