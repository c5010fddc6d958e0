"""Every exception of cmnet.

    CmnetError
    ├── InputError            a file, key or option is wrong                      exit status 2
    ├── LaunchError           a process did not come up
    ├── RunError              the run cannot go on                                exit status 1
    │   ├── CausalityError    a frame would arrive in its receiver's past
    │   ├── DeadlockError     work is outstanding and nothing will ever happen
    │   ├── SpinError         a node runs callbacks without its clock moving
    │   ├── SilentNodeError   a node does not answer its grant
    │   ├── StallError        work is outstanding and nothing was achieved for long
    │   └── NodeFailedError   a node's program raised
    ├── FrameError            bytes on a socket that are no frame of this run
    └── OperationError        an operation of the emulated machine failed; has ``definite``
        ├── LinkError         a plane gave up sending
        ├── PeerDeadError     the other end does not answer
        ├── MemoryRangeError  a one-sided access outside the registered memory
        └── CorruptError      bytes did not match their checksum

Operating errors are these; a bug is an ``assert``. ``definite`` means: it surely did not happen
(False: it may have happened).
"""

from __future__ import annotations


class CmnetError(Exception):
    """Root of all. ``code`` is stable and printed."""

    code = "CMNET"


class InputError(CmnetError):
    """What the user gave is wrong: names the file (or option), the key, the value and what is right."""

    code = "INPUT"

    def __init__(self, *, file: str, key: str, value: object, expected: str) -> None:
        self.file, self.key, self.value, self.expected = file, key, value, expected
        where = f"{file}: {key}" if key else file
        super().__init__(f"{where}: {value!r} is wrong; expected {expected}")


class LaunchError(CmnetError):
    code = "LAUNCH"


class RunError(CmnetError):
    code = "RUN"


class CausalityError(RunError):
    code = "CAUSALITY"


class DeadlockError(RunError):
    code = "DEADLOCK"


class SpinError(RunError):
    code = "SPIN"


class SilentNodeError(RunError):
    code = "SILENT"


class StallError(RunError):
    code = "STALL"


class NodeFailedError(RunError):
    code = "NODE_FAILED"


class FrameError(CmnetError):
    code = "FRAME"


class OperationError(CmnetError):
    """An operation of the emulated machine failed."""

    code = "OPERATION"

    def __init__(self, message: str, *, definite: bool) -> None:
        self.definite = definite
        super().__init__(message)


class LinkError(OperationError):
    code = "LINK"


class PeerDeadError(OperationError):
    code = "PEER_DEAD"


class MemoryRangeError(OperationError):
    code = "MEMORY_RANGE"


class CorruptError(OperationError):
    code = "CORRUPT"
