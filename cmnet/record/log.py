"""The run's log: what the supervisor saw and did, one JSON object a line, for people and scripts.

Owns the file ``log.jsonl`` of a run folder and its form: virtual time first, then a fixed event word and
its fields. The journal is the record of what happened on the machine; this is about the run itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TextIO

import structlog

FILE = "log.jsonl"


class Log:
    """Writes events; every line is on disk when ``event`` returns."""

    def __init__(self, folder: Path) -> None:
        self._file: TextIO = (folder / FILE).open("w", buffering=1, encoding="utf-8")
        self._logger = structlog.wrap_logger(
            structlog.WriteLogger(self._file),
            processors=[structlog.processors.JSONRenderer(sort_keys=False)],
            wrapper_class=structlog.BoundLogger,
        )

    def event(self, word: str, *, at_ps: int, **fields: Any) -> None:
        """``word`` happened at a virtual instant."""
        self._logger.info(word, **{"at_ps": at_ps, **fields})

    def close(self) -> None:
        """No more events."""
        self._file.close()
