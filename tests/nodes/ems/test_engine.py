"""The engine: a dict on disk whose last grant can be taken back, whenever its process died.

Run as a program (`test_engine.py PATH FIRST_GRANT`) it is the writer that the kill test kills.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import lmdb
import lmdb.verify
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from nodes.ems import engine as engine_module
from nodes.ems.engine import Durability, Engine, Statistics

MIB = 2**20


def open_engine(path: Path, *, node_id: str = "node00", map_bytes: int = 16 * MIB) -> Engine:
    return Engine(path, node_id=node_id, map_bytes=map_bytes, durability=Durability.PROCESS)


def contents(engine: Engine) -> dict[bytes, bytes]:
    found = {key: engine.get(key) for key in engine.keys()}  # noqa: SIM118  # no dict
    return {key: value for key, value in found.items() if value is not None}


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with open_engine(tmp_path / "disk") as opened:
        yield opened


def test_what_is_put_is_there_after_opening_again(tmp_path: Path) -> None:
    """The promise: acknowledged means on disk."""
    with open_engine(tmp_path) as engine:
        engine.put_many([(b"a", b"1"), (b"b", b"22")], grant=1)
        engine.delete_many([b"a", b"absent"], grant=1)
    with open_engine(tmp_path) as engine:
        assert contents(engine) == {b"b": b"22"}
        assert (engine.get(b"a"), engine.exists(b"a"), engine.exists(b"b")) == (None, False, True)
        assert engine.statistics() == Statistics(grant=1, commits=2, used_bytes=3)


def test_changes_of_one_key_apply_in_order(engine: Engine) -> None:
    """Within a commit the last one wins, and the accounts follow."""
    engine.commit([(b"k", b"1"), (b"k", None), (b"k", b"333")], grant=1)
    assert contents(engine) == {b"k": b"333"}
    assert engine.statistics().used_bytes == 4


def test_an_unreported_grant_is_taken_back(engine: Engine) -> None:
    """Overwritten, deleted and new keys, over two commits of one grant."""
    engine.put_many([(b"a", b"old"), (b"b", b"old")], grant=4)
    before = engine.statistics()
    engine.commit([(b"a", b"new"), (b"b", None), (b"c", b"new")], grant=5)
    engine.commit([(b"a", b"newer"), (b"c", None), (b"d", b"new")], grant=5)
    assert engine.undo_after(4) == 2
    assert contents(engine) == {b"a": b"old", b"b": b"old"}
    assert engine.statistics() == before
    assert engine.undo_after(4) == 0


def test_a_reported_grant_stays(engine: Engine) -> None:
    """The node died after its report: nothing is undone, now or after its next commit."""
    engine.put_many([(b"a", b"1")], grant=5)
    assert engine.undo_after(5) == 0
    engine.put_many([(b"b", b"1")], grant=9)
    assert engine.undo_after(8) == 1
    assert contents(engine) == {b"a": b"1"}


def test_the_very_first_grant_can_be_taken_back(engine: Engine) -> None:
    """A node that never reported anything comes back empty."""
    engine.put_many([(b"a", b"1")], grant=3)
    assert engine.undo_after(0) == 1
    assert engine.statistics() == Statistics(grant=0, commits=0, used_bytes=0)
    assert contents(engine) == {}


def test_two_unreported_grants_are_refused(engine: Engine) -> None:
    """It cannot happen (one report for each grant); silence would lose the truth."""
    engine.put_many([(b"a", b"1")], grant=1)
    engine.put_many([(b"a", b"2")], grant=2)
    with pytest.raises(engine_module.DamagedStoreError, match="only the last grant's"):
        engine.undo_after(0)


def test_grants_never_fall(engine: Engine) -> None:
    """A bug of the caller, not an operating error."""
    engine.put_many([(b"a", b"1")], grant=2)
    with pytest.raises(AssertionError, match="grants never fall"):
        engine.put_many([(b"a", b"2")], grant=1)


def test_commits_come_from_one_thread(engine: Engine) -> None:
    """LMDB's write lock belongs to a thread."""
    thread = threading.Thread(target=engine.put_many, args=([(b"a", b"1")],), kwargs={"grant": 1})
    thread.start()
    thread.join()
    with pytest.raises(AssertionError, match="one thread"):
        engine.put_many([(b"a", b"2")], grant=1)
    assert engine.get(b"a") == b"1"


def test_a_largest_piece_takes_16_pages(engine: Engine) -> None:
    """The reason for 65,520 bytes: LMDB adds no page for its own header."""
    engine.put_many([(b"first", bytes(65_520))], grant=1)
    with engine._env.begin() as txn:
        assert txn.stat(engine._data)["overflow_pages"] == 16


def test_the_settings_are_those_of_a_durable_store(tmp_path: Path) -> None:
    """kill -9 cannot show a missing fsync (the page cache survives), so the flags are read."""
    with Engine(tmp_path / "power", node_id="n", map_bytes=MIB) as engine:
        flags = engine._env.flags()
        assert (flags["sync"], flags["metasync"]) == (True, True)
        assert (flags["writemap"], flags["map_async"], flags["readahead"]) == (False, False, False)
        assert (flags["meminit"], flags["lock"], flags["subdir"]) == (True, True, True)
    with open_engine(tmp_path / "process") as engine:
        assert engine._env.flags()["sync"] is False


@pytest.mark.parametrize("key", [b"", bytes(512)])
def test_a_key_that_is_none_is_refused(engine: Engine, key: bytes) -> None:
    """Before the transaction, so that the rest of a batch is not stored without it."""
    with pytest.raises(engine_module.BadKeyError) as caught:
        engine.put_many([(b"good", b"1"), (key, b"1")], grant=1)
    assert caught.value.definite
    with pytest.raises(engine_module.BadKeyError):
        engine.get(key)
    assert contents(engine) == {}


@pytest.mark.parametrize("value", [b"", bytes(65_521)])
def test_a_value_that_is_no_piece_is_refused(engine: Engine, value: bytes) -> None:
    """Larger ones fragment the map; the empty one marks absence in the undo list."""
    with pytest.raises(engine_module.ValueSizeError):
        engine.put_many([(b"good", b"1"), (b"k", value)], grant=1)
    assert contents(engine) == {}


def test_a_full_map_stores_nothing_of_the_commit(tmp_path: Path) -> None:
    """All or none; the store works on after that."""
    with open_engine(tmp_path, map_bytes=MIB) as engine:
        engine.put_many([(b"a", b"1")], grant=1)
        before = engine.statistics()
        with pytest.raises(engine_module.MapFullError) as caught:
            engine.put_many([(bytes([n]), bytes(65_520)) for n in range(17)], grant=2)
        assert caught.value.definite
        assert (contents(engine), engine.statistics()) == ({b"a": b"1"}, before)
        engine.put_many([(b"b", b"1")], grant=2)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_named(code: int) -> None:
    """Which of the three comes depends on the file system; it may have happened."""
    error = lmdb.Error("mdb_txn_commit")
    object.__setattr__(error, "code", code)
    with pytest.raises(engine_module.DiskFullError) as caught, engine_module._store_errors():
        raise error
    assert not caught.value.definite


def test_a_full_disk_stops_puts_and_nothing_else(engine: Engine) -> None:
    """A limit on the size of files stands for the full disk; what was there is still served."""
    engine.put_many([(b"a", b"1")], grant=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
    try:
        with pytest.raises(engine_module.DiskFullError):
            engine.put_many([(bytes([n]), bytes(65_520)) for n in range(9)], grant=2)
        assert contents(engine) == {b"a": b"1"}
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    engine.put_many([(bytes([n]), bytes(65_520)) for n in range(9)], grant=2)
    assert len(engine.keys()) == 10


def test_a_path_that_cannot_be_is_a_store_error(tmp_path: Path) -> None:
    """Errors of the file system become ours at the edge."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(engine_module.StoreError):
        open_engine(tmp_path / "file" / "disk")


def test_another_nodes_disk_is_refused(tmp_path: Path) -> None:
    """Swapped directories must not serve one node's blocks as another's; nothing is changed."""
    open_engine(tmp_path, node_id="node07").close()
    with pytest.raises(engine_module.ForeignStoreError, match="belongs to node07, not node08"):
        open_engine(tmp_path, node_id="node08")
    open_engine(tmp_path, node_id="node07").close()


def test_one_process_opens_a_disk_once(engine: Engine, tmp_path: Path) -> None:
    """Two environments of one file in one process would corrupt it."""
    with pytest.raises(engine_module.StoreError, match="already open"):
        open_engine(tmp_path / "disk")


def test_wrong_accounts_are_found_at_opening(tmp_path: Path) -> None:
    """Counted anew at each start; others got this wrong."""
    with open_engine(tmp_path) as engine:
        engine.put_many([(b"a", b"1")], grant=1)
        with engine._env.begin(write=True) as txn:
            txn.put(b"b", b"beside the accounts", db=engine._data)
    with pytest.raises(engine_module.DamagedStoreError, match="2 bytes noted, 22 counted"):
        open_engine(tmp_path)


def test_a_file_that_is_no_environment_is_damaged(tmp_path: Path) -> None:
    """Overwritten meta pages."""
    (tmp_path / "data.mdb").write_bytes(b"x" * 8192)
    with pytest.raises(engine_module.DamagedStoreError):
        open_engine(tmp_path)


small_keys = st.sampled_from([b"k%d" % number for number in range(6)])
sizes = st.sampled_from([None, 1, 2, 3000, 65_520])
changes = st.lists(st.tuples(small_keys, sizes), min_size=1, max_size=5)


class EngineIsADict(RuleBasedStateMachine):
    """Against two dicts: as of the last report, and now. Dying goes back to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(dir=os.environ["ENGINE_TEST_PATH"]))
        self.engine = open_engine(self.path)
        self.grant, self.reported_grant, self.commits, self.reported_commits = 1, 0, 0, 0
        self.fill = 0
        self.now: dict[bytes, bytes] = {}
        self.reported: dict[bytes, bytes] = {}

    @rule(batch=changes)
    def commit(self, batch: list[tuple[bytes, int | None]]) -> None:
        self.fill += 1
        values = [None if size is None else bytes([self.fill % 256]) * size for _, size in batch]
        pairs = [(key, value) for (key, _), value in zip(batch, values)]
        self.engine.commit(pairs, grant=self.grant)
        self.commits += 1
        for key, value in pairs:
            self.now.pop(key, None)
            if value is not None:
                self.now[key] = value

    @rule(skipped=st.integers(0, 2))
    def report(self, skipped: int) -> None:
        self.reported, self.reported_commits = dict(self.now), self.commits
        self.reported_grant = self.grant
        self.grant += 1 + skipped

    @rule()
    def die_and_come_back(self) -> None:
        self.engine.close()
        self.engine = open_engine(self.path)
        assert self.engine.undo_after(self.reported_grant) == self.commits - self.reported_commits
        self.now, self.commits = dict(self.reported), self.reported_commits
        self.grant += 1

    @rule()
    def open_again(self) -> None:
        self.engine.close()
        self.engine = open_engine(self.path)

    @invariant()
    def same_as_the_dict(self) -> None:
        assert contents(self.engine) == self.now
        statistics = self.engine.statistics()
        assert statistics.used_bytes == sum(len(k) + len(v) for k, v in self.now.items())
        assert statistics.commits == self.commits

    def teardown(self) -> None:
        self.engine.close()


@pytest.mark.slow
def test_the_engine_is_a_dict_that_can_die(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any order of commits, reports, deaths and openings."""
    monkeypatch.setenv("ENGINE_TEST_PATH", str(tmp_path))
    run_state_machine_as_test(
        EngineIsADict, settings=settings(deadline=None, max_examples=25, stateful_step_count=20)
    )


COMMITS_PER_GRANT = 3


def written_in(grant: int, commit: int) -> list[engine_module.Change]:
    """What the writer program commits: overwrites, deletes and new keys, of all sizes."""
    new: list[engine_module.Change] = [
        (b"%d" % (grant * number % 17), b"%d/%d/" % (grant, commit) + bytes(number**2 * 500))
        for number in range(1, 12)
    ]
    return [*new, (b"%d" % (commit + grant % 13), None)]


def state_after(reported_grant: int) -> dict[bytes, bytes]:
    state: dict[bytes, bytes | None] = {}
    for grant in range(1, reported_grant + 1):
        for commit in range(COMMITS_PER_GRANT):
            state |= dict(written_in(grant, commit))
    return {key: value for key, value in state.items() if value is not None}


def write_until_killed(path: Path, first_grant: int) -> None:
    with open_engine(path, map_bytes=256 * MIB) as engine:
        assert os.write(1, b"\0")
        for grant in range(first_grant, 2**31):
            for commit in range(COMMITS_PER_GRANT):
                engine.commit(written_in(grant, commit), grant=grant)
            os.write(1, grant.to_bytes(4, "big"))


def run_and_kill(path: Path, *, first_grant: int, reports: int, spin: int) -> int:
    """Let the writer make some reports and a little more, kill it; returns its last report."""
    command = [sys.executable, __file__, str(path), str(first_grant)]
    env = os.environ | {"PYTHONPATH": os.getcwd()}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        seen = writer.stdout.read(1 + 4 * reports)
        for _ in range(spin):
            os.getppid()
        os.kill(writer.pid, signal.SIGKILL)
        seen += writer.stdout.read()
    return int.from_bytes(seen[-4:], "big") if len(seen) > 1 else first_grant - 1


@pytest.mark.machine
@pytest.mark.slow
def test_a_killed_writer_comes_back_as_of_its_last_report(tmp_path: Path) -> None:
    """kill -9 at odd moments of a real process, again and again on one disk."""
    reported_grant = 0
    for reports, spin in [
        (0, 0),
        (1, 900),
        (0, 5000),
        (3, 2700),
        (9, 100),
        (20, 9000),
        (4, 50_000),
    ]:
        reported_grant = run_and_kill(
            tmp_path, first_grant=reported_grant + 1, reports=reports, spin=spin
        )
        assert lmdb.verify.verify(str(tmp_path)) == []  # type: ignore[no-untyped-call]  # lmdb has no types
        with open_engine(tmp_path, map_bytes=256 * MIB) as engine:
            assert engine.undo_after(reported_grant) in range(COMMITS_PER_GRANT + 1)
            assert contents(engine) == state_after(reported_grant)
            assert engine.statistics().commits == reported_grant * COMMITS_PER_GRANT
    assert reported_grant >= 37


if __name__ == "__main__":
    write_until_killed(Path(sys.argv[1]), int(sys.argv[2]))
