"""The examples in docstrings hold."""

from __future__ import annotations

import doctest
import importlib

import pytest

MODULES = ("cmnet.units", "nodes.kv.groups", "nodes.serving.percentiles", "nodes.serving.workload")


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_the_module_hold(name: str) -> None:
    """An example that is no longer true is worse than none; a module listed here has some."""
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted > 0
    assert found.failed == 0
