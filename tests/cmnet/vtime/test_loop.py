"""Plain asyncio code in exact virtual time (design 1.1, 1.2)."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from fractions import Fraction
from typing import Any, TypeVar

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from cmnet.errors import DeadlockError, SpinError
from cmnet.units import NEVER_PS, PS_PER_S
from cmnet.vtime import loop as vtime_loop
from cmnet.vtime import outside
from cmnet.vtime.loop import VirtualLoop

T = TypeVar("T")
ORIGINS_S = [0, 20_000_000, 1_700_000_000]
S = PS_PER_S


def run(main: Callable[[VirtualLoop], Awaitable[T]], *, origin_s: int = 0) -> T:
    """Run a coroutine function to its end on a loop of its own."""

    async def started() -> T:
        return await main(running())

    with asyncio.Runner(loop_factory=lambda: VirtualLoop(origin_ps=origin_s * S)) as runner:
        return runner.run(started())


def running() -> VirtualLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop


# --- the clock ------------------------------------------------------------------------------------


@pytest.mark.parametrize("origin_s", ORIGINS_S)
def test_sleep_takes_what_it_says_and_no_wall_time(origin_s: int) -> None:
    async def main(loop: VirtualLoop) -> list[int]:
        instants = []
        for delay_s in (1e-3, 0.1, 3600.0, 0, 5e-324, 1e-12, 86400 * 100):
            await asyncio.sleep(delay_s)
            instants.append(loop.now_ps)
        return instants

    begun = time.perf_counter()
    assert run(main, origin_s=origin_s) == [
        S // 1000,
        S // 1000 + S // 10,
        S // 1000 + S // 10 + 3600 * S,
        S // 1000 + S // 10 + 3600 * S,
        S // 1000 + S // 10 + 3600 * S + 1,
        S // 1000 + S // 10 + 3600 * S + 2,
        S // 1000 + S // 10 + 3600 * S + 2 + 86400 * 100 * S,
    ]
    assert time.perf_counter() - begun < 5


@settings(deadline=None, max_examples=200)
@given(
    origin_s=st.sampled_from(ORIGINS_S),
    now_ps=st.integers(0, 10**16),
    delay=st.one_of(st.floats(0, 1e5), st.floats(0, 1e-6), st.just(0.1)),
)
def test_no_timer_fires_before_its_float_deadline(origin_s: int, now_ps: int, delay: float) -> None:
    """Libraries re-arm when ``time() < when``: at the least instant with ``time() >= when`` they never
    do. A picosecond earlier is too early, or it is an instant that is nearer."""
    loop = VirtualLoop(origin_ps=origin_s * S, start_ps=now_ps)
    try:
        when = loop.time() + delay
        seen: list[tuple[int, float]] = []
        loop.call_at(when, lambda: seen.append((loop.now_ps, loop.time())))
        loop.run_until(NEVER_PS)
        at_ps, told = seen[0]
        assert told >= when
        exact_ps = Fraction(when) * S - origin_s * S
        assert (
            at_ps == now_ps
            or at_ps - 1 < exact_ps + Fraction(1, 2)
            or ((origin_s * S + at_ps - 1) / S < when)
        )
    finally:
        loop.close()


@settings(deadline=None, max_examples=100)
@given(delay=st.floats(0, 1e6), now_ps=st.integers(0, 10**15))
def test_call_later_is_the_nearest_picosecond(delay: float, now_ps: int) -> None:
    loop = VirtualLoop(origin_ps=1_700_000_000 * S, start_ps=now_ps)
    try:
        seen: list[int] = []
        loop.call_later(delay, lambda: seen.append(loop.now_ps))
        loop.run_until(NEVER_PS)
        off = abs(Fraction(delay) * S - (seen[0] - now_ps))
        assert off <= Fraction(1, 2) or (seen[0] - now_ps == 1 and delay > 0)
    finally:
        loop.close()


def test_time_is_the_correctly_rounded_quotient() -> None:
    loop = VirtualLoop(origin_ps=1_700_000_000 * S, start_ps=123_456_789)
    assert loop.time() == float(Fraction(1_700_000_000 * S + 123_456_789, S))
    loop.close()


# --- asyncio as it is -----------------------------------------------------------------------------


def test_timeouts_queues_events_and_groups_keep_their_order() -> None:
    async def main(loop: VirtualLoop) -> list[Any]:
        order: list[Any] = []
        queue: asyncio.Queue[int] = asyncio.Queue(maxsize=2)
        gate = asyncio.Event()

        async def produce() -> None:
            for number in range(5):
                await asyncio.sleep(0.001)
                await queue.put(number)
            gate.set()

        async def consume(name: str) -> None:
            while True:
                try:
                    async with asyncio.timeout(0.01):
                        number = await queue.get()
                except TimeoutError:
                    order.append((name, "late", loop.now_ps))
                    return
                order.append((name, number, loop.now_ps))

        async with asyncio.TaskGroup() as group:
            group.create_task(produce())
            group.create_task(consume("a"))
            group.create_task(consume("b"))
        await gate.wait()
        return order

    ms = S // 1000
    assert run(main) == [
        ("a", 0, 1 * ms),
        ("b", 1, 2 * ms),
        ("a", 2, 3 * ms),
        ("b", 3, 4 * ms),
        ("a", 4, 5 * ms),
        ("b", "late", 14 * ms),
        ("a", "late", 15 * ms),
    ]


def test_gather_keeps_the_order_of_its_arguments() -> None:
    async def main(loop: VirtualLoop) -> list[int]:
        async def after(number: int) -> int:
            await asyncio.sleep((7 * number) % 5)
            return number

        return await asyncio.gather(*[after(number) for number in range(9)])

    assert run(main) == list(range(9))


def test_a_group_that_fails_cancels_in_order_of_creation() -> None:
    """asyncio keeps sets of tasks; by address there were 12 orders in 12 runs (measured)."""

    async def main(loop: VirtualLoop) -> tuple[list[int], list[str]]:
        cancelled: list[int] = []
        trash = [bytearray(n) for n in range(50)]

        async def wait(number: int) -> None:
            trash.append(bytearray(number * 37))
            try:
                await asyncio.sleep(10)
            except asyncio.CancelledError:
                cancelled.append(number)
                raise ValueError(str(number)) from None

        async def fail() -> None:
            await asyncio.sleep(1)
            raise KeyError("first")

        try:
            async with asyncio.TaskGroup() as group:
                for number in range(40):
                    group.create_task(wait(number))
                group.create_task(fail())
        except ExceptionGroup as raised:
            return cancelled, [str(error) for error in raised.exceptions]
        raise AssertionError

    cancelled, errors = run(main)
    assert cancelled == sorted(cancelled) and len(cancelled) == 40
    assert errors == ["'first'", *map(str, range(40))]


def test_a_set_of_tasks_or_futures_iterates_by_creation() -> None:
    async def main(loop: VirtualLoop) -> bool:
        futures = [loop.create_future() for _ in range(30)]
        tasks = [loop.create_task(asyncio.sleep(0)) for _ in range(30)]
        done, _ = await asyncio.wait(tasks)
        return list({*futures[::-1]}) == futures and list(done) == tasks

    assert run(main)


def test_what_an_instant_creates_for_itself_runs_after_what_is_there() -> None:
    loop = VirtualLoop()
    order: list[str] = []

    def first() -> None:
        order.append("first")
        loop.call_soon(order.append, "soon")
        loop.call_later(0, order.append, "later 0")
        loop.agenda.add_port(loop.now_ps, 1, order.append, "port")

    loop.call_at_ps(5, first)
    loop.call_at_ps(5, order.append, "second")
    loop.run_until(6)
    loop.close()
    assert order == ["first", "second", "soon", "port", "later 0"]


def test_async_generators_are_shut_down_at_the_end() -> None:
    closed: list[str] = []

    async def main(loop: VirtualLoop) -> None:
        async def numbers() -> AsyncIterator[int]:
            try:
                while True:
                    yield 1
            finally:
                closed.append("closed")

        kept.append(numbers())
        await anext(kept[0])

    kept: list[Any] = []
    run(main)
    assert closed == ["closed"]


def test_a_loop_stops_and_goes_on() -> None:
    loop = VirtualLoop()
    seen: list[int] = []

    def stop() -> None:
        seen.append(loop.now_ps)
        loop.stop()

    for at_ps in (10, 20, 30):
        loop.call_at_ps(at_ps, stop)
    loop.run_forever()
    assert seen == [10]
    loop.run_forever()
    assert seen == [10, 20]
    loop.close()


# --- horizons -------------------------------------------------------------------------------------


def test_run_until_runs_what_is_before_the_horizon_only() -> None:
    loop = VirtualLoop()
    seen: list[int] = []
    for at_ps in (3, 9, 10, 11):
        loop.call_at_ps(at_ps, seen.append, at_ps)
    assert loop.run_until(10)
    assert seen == [3, 9] and loop.next_at_ps() == 10
    loop.close()


def test_a_horizon_at_now_runs_nothing_not_even_what_is_ready() -> None:
    """A barrier at the instant at which a process begins: its program has not begun."""
    loop = VirtualLoop(start_ps=7)
    seen: list[str] = []
    loop.call_soon(seen.append, "ready")
    assert loop.run_until(7) and seen == [] and loop.next_at_ps() == 7
    loop.run_until(8)
    assert seen == ["ready"]
    loop.close()


def test_a_cancelled_timer_is_no_event() -> None:
    loop = VirtualLoop()
    handles = [loop.call_at_ps(at_ps, lambda: None) for at_ps in range(1, 400)]
    for handle in handles[:-1]:
        handle.cancel()
    assert loop.next_at_ps() == 399
    assert len(loop.agenda.heap) < 250
    handles[-1].cancel()
    assert loop.next_at_ps() == NEVER_PS
    loop.close()


# --- holds ----------------------------------------------------------------------------------------


def hold_story(pauses_s: list[float]) -> list[Any]:
    """Jobs of the given wall lengths, all other things equal: what happened, in order."""

    async def main(loop: VirtualLoop) -> list[Any]:
        story: list[Any] = []

        def job(number: int) -> int:
            time.sleep(pauses_s[number])
            loop.call_soon_threadsafe(story.append, ("called", number))
            if number == 2:
                raise OSError(str(number))
            return number

        async def one(number: int, duration_ps: int) -> None:
            try:
                got: Any = await loop.hold(job, number, duration_ps=duration_ps)
            except OSError as error:
                got = f"error {error}"
            story.append((got, loop.now_ps))

        async def tick() -> None:
            for _ in range(6):
                await loop.sleep_ps(1000)
                story.append(("tick", loop.now_ps))

        async with asyncio.TaskGroup() as group:
            for number, duration_ps in enumerate((2500, 2500, 0, 500, 2500)):
                group.create_task(one(number, duration_ps))
            group.create_task(tick())
        return story

    return run(main)


def test_holds_end_at_their_instant_in_order_however_long_the_threads_take() -> None:
    quick = hold_story([0, 0, 0, 0, 0])
    assert quick == hold_story([0.03, 0.01, 0.02, 0, 0.005])
    assert quick == [
        ("called", 2),
        ("error 2", 0),
        ("called", 3),
        (3, 500),
        ("tick", 1000),
        ("tick", 2000),
        ("called", 0),
        (0, 2500),
        ("called", 1),
        (1, 2500),
        ("called", 4),
        (4, 2500),
        ("tick", 3000),
        ("tick", 4000),
        ("tick", 5000),
        ("tick", 6000),
    ]


def test_a_drain_stops_at_a_hold_and_goes_on_exactly_there() -> None:
    loop = VirtualLoop()
    release, resumed = threading.Event(), threading.Event()
    loop.resume = resumed.set
    order: list[str] = []
    future = loop.hold(release.wait, 10, duration_ps=5)
    future.add_done_callback(lambda _: order.append("done"))
    loop.call_at_ps(5, order.append, "same instant")
    loop.call_at_ps(6, order.append, "after")
    assert not loop.run_until(10) and order == []
    assert not loop.threads_done()
    release.set()
    while not loop.threads_done():
        time.sleep(0.001)
    assert loop.run_until(10)
    assert order == ["same instant", "done", "after"]
    loop.close()


def test_to_cancel_a_holds_future_does_not_end_the_hold() -> None:
    async def main(loop: VirtualLoop) -> tuple[list[str], int]:
        effects: list[str] = []

        def job() -> None:
            time.sleep(0.02)
            effects.append("done")

        future = loop.hold(job, duration_ps=100)
        future.cancel()
        await loop.sleep_ps(101)
        return effects, loop.now_ps

    assert run(main) == (["done"], 101)


def test_run_in_executor_and_to_thread_take_no_virtual_time() -> None:
    async def main(loop: VirtualLoop) -> tuple[int, int, int]:
        first = await loop.run_in_executor(None, lambda: 3)
        second = await asyncio.to_thread(lambda: 4)
        return first, second, loop.now_ps

    assert run(main) == (3, 4, 0)


def test_a_thread_without_a_hold_may_not_call() -> None:
    async def main(loop: VirtualLoop) -> str:
        said: list[str] = []

        def stranger() -> None:
            try:
                loop.call_soon_threadsafe(print)
            except RuntimeError as error:
                said.append(str(error))

        thread = threading.Thread(target=stranger)
        thread.start()
        thread.join()
        loop.call_soon_threadsafe(said.append, "from the loop's own thread")
        await asyncio.sleep(0)
        return " / ".join(said)

    assert run(main).startswith("a thread without a hold has no virtual instant")


def test_what_must_be_on_disk_is_waited_for_at_a_report() -> None:
    loop = VirtualLoop()
    release, resumed = threading.Event(), threading.Event()
    loop.resume = resumed.set
    loop.hold(release.wait, 10, duration_ps=1000, on_disk=True)
    assert loop.run_until(10) and not loop.disk_done()
    release.set()
    while not loop.disk_done():
        time.sleep(0.001)
    loop.run_until(NEVER_PS)
    loop.close()


# --- what goes wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_the_loop_stays_drainable_after_a_base_exception(error: type[BaseException]) -> None:
    loop = VirtualLoop()
    seen: list[str] = []

    def break_it() -> None:
        raise error

    loop.call_soon(seen.append, "before")
    loop.call_soon(break_it)
    loop.call_soon(seen.append, "after")
    loop.call_at_ps(3, break_it)
    loop.call_at_ps(3, seen.append, "same instant")
    for _ in range(2):
        with pytest.raises(error):
            loop.run_until(10)
    loop.run_until(10)
    assert seen == ["before", "after", "same instant"]
    loop.close()


def test_an_error_in_a_callback_goes_to_the_exception_handler() -> None:
    loop = VirtualLoop()
    told: list[Any] = []
    loop.set_exception_handler(lambda _, context: told.append(context["exception"]))
    loop.call_soon(lambda: 1 // 0)
    loop.call_at_ps(5, lambda: [][0])
    assert loop.run_until(10)
    assert [type(error) for error in told] == [ZeroDivisionError, IndexError]
    loop.close()


def test_to_spin_is_an_error_that_leaves_the_loop_drainable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = VirtualLoop()
    loop.spin_limit = 1000
    stopped: list[bool] = []

    def ready() -> None:
        if not stopped:
            loop.call_soon(ready)

    def timers() -> None:
        if len(stopped) < 2:
            loop.call_later(0, timers)

    loop.call_soon(ready)
    with pytest.raises(SpinError, match="1000 callbacks at 0 s"):
        loop.run_until(10)
    assert ready in loop.due()
    stopped.append(True)
    loop.call_soon(timers)
    with pytest.raises(SpinError):
        loop.run_until(10)
    assert timers in loop.due()
    stopped.append(True)
    assert loop.run_until(10)
    loop.close()


def test_alone_with_nothing_left_to_happen_is_a_deadlock() -> None:
    async def main(loop: VirtualLoop) -> None:
        await asyncio.sleep(2)
        await loop.create_future()

    with pytest.raises(DeadlockError, match="after 2 s"):
        run(main)


REFUSED = [
    lambda loop: loop.create_unix_connection(None, "/tmp/x"),
    lambda loop: loop.create_datagram_endpoint(None),
    lambda loop: loop.subprocess_exec(None, "true"),
    lambda loop: loop.add_reader(0, print),
    lambda loop: loop.add_signal_handler(10, print),
    lambda loop: loop.create_connection(None, "localhost", 1),
    lambda loop: loop.getaddrinfo("localhost", 1),
    lambda loop: loop.sock_recv(None, 1),
]


@pytest.mark.parametrize("call", REFUSED)
def test_what_would_run_on_the_wall_clock_is_refused(call: Callable[[Any], Any]) -> None:
    loop = VirtualLoop()
    with pytest.raises(RuntimeError, match=r"loop\.\w+\(\)"):
        call(loop)
    loop.close()


def test_every_call_of_uvloop_is_overridden_virtual_or_known_to_be_harmless() -> None:
    """A new version of uvloop must not bring a call that runs on the wall clock."""
    known = """call_exception_handler close create_future create_task default_exception_handler get_debug
        get_exception_handler get_task_factory is_closed is_running print_debug_info run_forever
        run_until_complete set_debug set_default_executor set_exception_handler set_task_factory
        shutdown_asyncgens shutdown_default_executor stop time call_soon call_soon_threadsafe
        call_later call_at run_in_executor sock_sendfile slow_callback_duration""".split()
    public = {name for name in dir(uvloop.Loop) if not name.startswith("_")}
    ours = {*outside.VIRTUAL, *outside.REFUSED, *known}
    assert public - ours == set()


def test_a_plane_can_install_the_network() -> None:
    class Network:
        async def getaddrinfo(self, host: str, port: int) -> list[Any]:
            return [(host, port)]

    async def main(loop: VirtualLoop) -> Any:
        loop.network = Network()
        return await loop.getaddrinfo("node01", 80)

    assert run(main) == [("node01", 80)]


def test_the_collector_runs_at_virtual_instants(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a count of callbacks and events (a sleep is one of each), so at the same instants in every run."""
    monkeypatch.setattr(vtime_loop, "GC_EVERY", 100)
    instants: list[int] = []
    loop = VirtualLoop()
    loop._gc_at = 100
    monkeypatch.setattr(gc, "collect", lambda: instants.append(loop.now_ps))

    async def tick() -> None:
        for _ in range(1000):
            await loop.sleep_ps(1)

    loop.create_task(tick())
    loop.run_until(10_000)
    loop.close()
    assert len(instants) == 19 and instants == sorted(set(instants))


def test_nothing_is_slow() -> None:
    loop = VirtualLoop()
    assert loop.slow_callback_duration == math.inf
    loop.close()


@pytest.mark.parametrize("jump", [False, True], ids=["events", "advance"])
def test_a_node_that_lives_on_events_alone_collects_too(
    monkeypatch: pytest.MonkeyPatch, jump: bool
) -> None:
    """Deliveries and port events make garbage as callbacks do; an advance stands for an event."""
    loop = VirtualLoop()
    instants: list[int] = []
    loop._gc_at = 100
    monkeypatch.setattr(gc, "collect", lambda: instants.append(loop.now_ps))

    def event(_: object) -> None:
        if jump:
            loop.advance(loop.now_ps + 1)

    try:
        for number in range(1, 300):
            loop.agenda.add_port(10 * number, 0, event, None)
        loop.run_until(10_000)
    finally:
        loop.close()
    assert instants == [510 if jump else 1010]
