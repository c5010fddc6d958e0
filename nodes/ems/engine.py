"""The disk of one node's store: one LMDB environment, its commits, and the undo of the last grant.

Owns the environment, its settings, what is kept beside the data (the node's name, the count of
used bytes, the number of the last commit's grant, what that grant replaced) and the mapping of
LMDB's errors. Does not own the meaning of keys and values, capacity rules, threads or virtual
time: each call ends its transaction before it returns. All commits of an environment come from one
thread (LMDB's write lock belongs to a thread); reads may come from any.

    OperationError
    └── StoreError             the disk refused, for a reason not listed below
        ├── BadKeyError        empty, or longer than LMDB's 511 bytes
        ├── ValueSizeError     empty, or larger than one piece
        ├── MapFullError       the map has no free pages; nothing of the commit is stored
        ├── DiskFullError      the disk under the map is full or fails
        ├── ForeignStoreError  the environment belongs to another node
        └── DamagedStoreError  what is on disk contradicts itself

**Undo** (design 1.8). A node that dies unplanned may have made commits under a grant that it never
reported; for the run these never happened. So the first commit of a grant empties the undo list,
and each commit, in its own transaction, adds what it replaces: the old value, or nothing for a key
that was absent, once for each key. `undo_after` puts all of it back and is itself one transaction.
There is at most one grant without a report, so one list is enough.

An environment must be opened after the fork, and once in a process.
"""

from __future__ import annotations

import contextlib
import enum
import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import lmdb
import msgspec

from cmnet.errors import OperationError

KEY_BYTES_MAX = 511
"""LMDB 0.9's limit, compiled in."""
VALUE_BYTES_MAX = 65_520
"""16 pages of 4 KiB less LMDB's page header: equal runs of pages do not fragment the map."""
MAP_BYTES = 2**30
"""Address space by default; the file grows as it is used."""

Change = tuple[bytes, bytes | None]
"""A key and its new value, or None to delete it."""

_FORMAT = b"ems-1"
_ABSENT = b""
"""In the undo list: the key had no value. A stored value is never empty."""
_DISK_FULL = frozenset({5, 28, 122})
"""EIO, ENOSPC, EDQUOT: LMDB reports a full disk as each of them, by file system."""
_STATE = struct.Struct("<QQQ")


class Durability(enum.Enum):
    """What a commit survives when it returns."""

    POWER = "power"
    """Loss of power: fsync at each commit, as the real store promises."""
    PROCESS = "process"
    """kill -9 of every process, by the kernel's page cache. For runs whose disk nobody keeps."""


class StoreError(OperationError):
    code = "STORE"


class BadKeyError(StoreError):
    code = "STORE_BAD_KEY"


class ValueSizeError(StoreError):
    code = "STORE_VALUE_SIZE"


class MapFullError(StoreError):
    code = "STORE_MAP_FULL"


class DiskFullError(StoreError):
    code = "STORE_DISK_FULL"


class ForeignStoreError(StoreError):
    code = "STORE_FOREIGN"


class DamagedStoreError(StoreError):
    code = "STORE_DAMAGED"


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counters as of the last commit; an undo takes them back too."""

    grant: int
    """Number of the grant of the last commit, 0 before the first."""
    commits: int
    used_bytes: int
    """Sum of the lengths of all keys and values."""

    def pack(self) -> bytes:
        return _STATE.pack(self.grant, self.commits, self.used_bytes)


class Engine:
    """One open environment. Opening counts the used bytes anew and compares."""

    def __init__(
        self,
        path: Path,
        *,
        node_id: str,
        map_bytes: int = MAP_BYTES,
        durability: Durability = Durability.POWER,
    ) -> None:
        with _store_errors():
            self._env = _open(path, map_bytes=map_bytes, durability=durability)
        self._writer: int | None = None
        try:
            with _store_errors():
                self._env.reader_check()
                self._meta, self._data, self._undo = map(
                    self._env.open_db, (b"meta", b"data", b"undo")
                )
                self._claim(node_id)
                self._recount()
        except BaseException:
            self._env.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End it; the caller's writer thread must have ended before."""
        self._env.close()

    def put_many(self, items: Iterable[tuple[bytes, bytes]], *, grant: int) -> None:
        """Store these values, all or none."""
        self.commit(tuple(items), grant=grant)

    def delete_many(self, keys: Iterable[bytes], *, grant: int) -> None:
        """Delete these keys, all or none; an absent one is no error."""
        self.commit([(key, None) for key in keys], grant=grant)

    def commit(self, changes: Sequence[Change], *, grant: int) -> None:
        """Apply changes in order, all or none, on disk when it returns.

        ``grant`` is the number of the grant under which it was submitted; it never falls.
        Raises StoreError.
        """
        self._writer = self._writer or threading.get_ident()
        assert self._writer == threading.get_ident(), "commits come from one thread"
        assert grant > 0, "grants count from 1"
        for key, value in changes:
            _check_change(key, value)
        with _store_errors(), self._env.begin(write=True) as txn:
            before = self._state(txn)
            assert before.grant <= grant, "grants never fall"
            if before.grant < grant:
                self._begin_grant(txn, before)
            growth = sum(self._apply(txn, key, value) for key, value in changes)
            after = Statistics(
                grant=grant, commits=before.commits + 1, used_bytes=before.used_bytes + growth
            )
            txn.put(b"state", after.pack(), db=self._meta)

    def undo_after(self, reported_grant: int) -> int:
        """Take back what was committed under a grant after the last reported one.

        For the start of a node after an unplanned death, before its first commit. Returns the
        commits undone; a second call undoes nothing more. Raises StoreError.
        """
        with _store_errors(), self._env.begin(write=True) as txn:
            state = self._state(txn)
            if state.grant <= reported_grant:
                return 0
            before = _unpack(txn.get(b"before", db=self._meta))
            if before.grant > reported_grant:
                raise DamagedStoreError(
                    f"commits of grants {before.grant} and {state.grant} are both later than"
                    f" {reported_grant}; only the last grant's can be undone",
                    definite=True,
                )
            for key, old in txn.cursor(db=self._undo):
                _set(txn, key, old or None, db=self._data)
            txn.put(b"state", before.pack(), db=self._meta)
            return state.commits - before.commits

    def get(self, key: bytes) -> bytes | None:
        """The value of a key, copied out, or None. Raises StoreError."""
        _check_key(key)
        with _store_errors(), self._env.begin(db=self._data) as txn:
            return txn.get(key)

    def exists(self, key: bytes) -> bool:
        """Whether the key has a value, without reading it. Raises StoreError."""
        _check_key(key)
        with _store_errors(), self._env.begin(db=self._data, buffers=True) as txn:
            return txn.get(key) is not None

    def keys(self) -> list[bytes]:
        """All keys, rising. Raises StoreError."""
        with _store_errors(), self._env.begin(db=self._data) as txn:
            return list(txn.cursor().iternext(keys=True, values=False))

    def statistics(self) -> Statistics:
        """The counters as of the last commit. Raises StoreError."""
        with _store_errors(), self._env.begin() as txn:
            return self._state(txn)

    def _claim(self, node_id: str) -> None:
        """Write the node's name into a new environment; refuse one with another name."""
        with self._env.begin(write=True, db=self._meta) as txn:
            owner, form = txn.get(b"node"), txn.get(b"format")
            if owner is None:
                txn.put(b"node", node_id.encode())
                txn.put(b"format", _FORMAT)
                empty = Statistics(grant=0, commits=0, used_bytes=0)
                txn.put(b"state", empty.pack())
            elif form != _FORMAT:
                raise DamagedStoreError(f"format {form!r}, not {_FORMAT!r}", definite=True)
            elif owner != node_id.encode():
                raise ForeignStoreError(
                    f"{self._env.path()} belongs to {owner.decode()}, not {node_id}", definite=True
                )

    def _recount(self) -> None:
        with self._env.begin(db=self._data, buffers=True) as txn:
            counted = sum(len(key) + len(value) for key, value in txn.cursor())
        used_bytes = self.statistics().used_bytes
        if counted != used_bytes:
            raise DamagedStoreError(f"{used_bytes} bytes noted, {counted} counted", definite=True)

    def _state(self, txn: lmdb.Transaction[bytes]) -> Statistics:
        return _unpack(txn.get(b"state", db=self._meta))

    def _begin_grant(self, txn: lmdb.Transaction[bytes], before: Statistics) -> None:
        """Forget what the last grant replaced: it was reported, else there were no later one."""
        txn.drop(self._undo, delete=False)
        txn.put(b"before", before.pack(), db=self._meta)

    def _apply(self, txn: lmdb.Transaction[bytes], key: bytes, value: bytes | None) -> int:
        """Make one change and keep what it replaces; returns by how many bytes the data grew."""
        old = txn.get(key, db=self._data)
        txn.put(key, _ABSENT if old is None else old, overwrite=False, db=self._undo)
        _set(txn, key, value, db=self._data)
        return _size(key, value) - _size(key, old)


def _open(path: Path, *, map_bytes: int, durability: Durability) -> lmdb.Environment:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    sync = durability is Durability.POWER
    return lmdb.open(
        str(path),
        map_size=map_bytes,
        subdir=True,
        max_dbs=16,
        max_readers=64,
        sync=sync,
        metasync=True,
        writemap=False,  # a full disk would be a SIGBUS
        map_async=False,
        readahead=False,
        meminit=True,
        lock=True,
        max_spare_txns=0,
        mode=0o700,
    )


def _check_key(key: bytes) -> None:
    if not 1 <= len(key) <= KEY_BYTES_MAX:
        raise BadKeyError(f"a key of {len(key)} bytes, not 1 to {KEY_BYTES_MAX}", definite=True)


def _check_change(key: bytes, value: bytes | None) -> None:
    _check_key(key)
    if value is not None and not 1 <= len(value) <= VALUE_BYTES_MAX:
        raise ValueSizeError(
            f"a value of {len(value)} bytes, not 1 to {VALUE_BYTES_MAX}", definite=True
        )


def _set(
    txn: lmdb.Transaction[bytes], key: bytes, value: bytes | None, *, db: lmdb._Database
) -> None:
    if value is None:
        txn.delete(key, db=db)
    else:
        txn.put(key, value, db=db)


def _size(key: bytes, value: bytes | None) -> int:
    return 0 if value is None else len(key) + len(value)


def _unpack(packed: bytes | None) -> Statistics:
    if packed is None or len(packed) != _STATE.size:
        raise DamagedStoreError("its counters are missing", definite=True)
    grant, commits, used_bytes = _STATE.unpack(packed)
    return Statistics(grant=grant, commits=commits, used_bytes=used_bytes)


@contextlib.contextmanager
def _store_errors() -> Iterator[None]:
    """Turn errors of LMDB and of the files under it into ours."""
    try:
        yield
    except lmdb.MapFullError as error:
        raise MapFullError(str(error), definite=True) from error
    except (lmdb.CorruptedError, lmdb.InvalidError, lmdb.VersionMismatchError) as error:
        raise DamagedStoreError(str(error), definite=False) from error
    except lmdb.Error as error:
        kind = DiskFullError if error.code in _DISK_FULL else StoreError
        raise kind(str(error), definite=False) from error
    except OSError as error:
        kind = DiskFullError if error.errno in _DISK_FULL else StoreError
        raise kind(str(error), definite=True) from error
