"""What holds for all tests: a collection of garbage looks at what tests made, not at the modules."""

from __future__ import annotations

import gc


def pytest_collection_finish() -> None:
    """Modules live to the end: to look through them again and again takes a fifth of the time."""
    gc.collect()
    gc.freeze()
