"""The event loop of a node: plain asyncio code in virtual time (design 1.1, 1.2).

Owns the clock, the ready deque, the agenda and the holds. Does not own sockets: the mesh reads and
writes them through ``native_reader`` and ``native_writer``; everything else that uvloop offers for the
outside world is either virtual (the ``network`` that a plane installs) or refused, because uvloop's
own transports call round these overrides and would run at a moment of the wall clock.

Two ways to run: ``run_until`` drains up to a horizon, called by whoever has a grant; and the ordinary
``run_forever`` / ``run_until_complete``, which grants itself everything (one process, no conductor).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import math
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple

import uvloop

from cmnet.errors import DeadlockError, SpinError
from cmnet.units import NEVER_PS, PS_PER_S, format_ps, nearest_ps
from cmnet.vtime import outside
from cmnet.vtime.agenda import Agenda, Event

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

SPIN_LIMIT = 1_000_000
"""Callbacks without the clock moving after which a node counts as spinning (design 1.7)."""

GC_EVERY = 600_000
"""Callbacks and events between two collections: the collector runs at virtual instants only (design
1.2). 300,000 wakings, each an event and its callback, keep it below 1 % of a busy node's time; a count,
so the same in every run."""


class VirtualTask(asyncio.Task[T]):
    """A task that hashes by its creation number: asyncio keeps sets of tasks, whose order must not
    depend on addresses (engine measurements: 12 orders in 12 runs without it)."""

    def __init__(self, coro: Any, *, loop: VirtualLoop, **options: Any) -> None:
        self.number = loop.next_number()
        super().__init__(coro, loop=loop, **options)

    def __hash__(self) -> int:
        return self.number


class VirtualFuture(asyncio.Future[T]):
    """A future that hashes by its creation number, for the same reason."""

    def __init__(self, *, loop: VirtualLoop) -> None:
        self.number = loop.next_number()
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self.number


class Hold:
    """A job on a thread that ends, in virtual time, at a known instant (design 1.2)."""

    __slots__ = ("called", "future", "loop", "thread")

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.future = loop.create_future()
        self.thread: concurrent.futures.Future[Any] | None = None
        self.called: list[asyncio.Handle] = []


_in_hold = threading.local()


class VirtualLoop(uvloop.Loop):
    """uvloop with its time replaced. ``now_ps`` is the clock; only the drain moves it."""

    def __init__(self, *, origin_ps: int = 0, start_ps: int = 0) -> None:
        super().__init__()
        self.now_ps = start_ps
        self.agenda = Agenda()
        self.network: Any = None
        self.spin_limit = SPIN_LIMIT
        self.slow_callback_duration = math.inf
        self.callbacks_run = 0
        self.events_run = 0
        """What the agenda held, and what ran without it by ``advance``: the same however windows
        fall."""
        self._origin_ps = origin_ps
        self._ready: deque[asyncio.Handle] = deque()
        self._instant: deque[Event] = deque()
        self._horizon_ps = 0
        self._numbers = 0
        self._spins = 0
        self._gc_at = GC_EVERY
        self._stop_asked = False
        self._self_granted = False
        self._pumping = False
        self._threads: concurrent.futures.ThreadPoolExecutor | None = None
        self._holds: dict[Hold, None] = {}
        self._disk_holds: list[Hold] = []
        self._failure: BaseException | None = None
        self._cancelled_timers = 0
        self.resume: Callable[[], None] = self._pump

    # --- time -------------------------------------------------------------------------------------

    def time(self) -> float:
        """Seconds since the origin, by true division of integers (correctly rounded)."""
        return (self._origin_ps + self.now_ps) / PS_PER_S

    def next_number(self) -> int:
        """Creation numbers of tasks and futures."""
        self._numbers += 1
        return self._numbers

    def create_future(self) -> asyncio.Future[Any]:
        return VirtualFuture(loop=self)

    def create_task(  # type: ignore[override]  # uvloop's stub lacks the context of 3.11
        self, coro: Coroutine[Any, Any, T] | Generator[Any, None, T], **options: Any
    ) -> asyncio.Task[T]:
        return VirtualTask(coro, loop=self, **options)

    # --- callbacks and timers ---------------------------------------------------------------------

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        if self._self_granted and not self._pumping:
            self._arm_pump()
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """From the loop's thread: call_soon. From a held thread: runs at the hold's instant.
        From any other thread: RuntimeError, since there is no instant at which it could run."""
        hold = getattr(_in_hold, "hold", None)
        if hold is not None:
            handle = asyncio.Handle(callback, args, self, context)
            hold.called.append(handle)
            return handle
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("a thread without a hold has no virtual instant to call at")
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self,
        delay: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """After ``delay`` seconds to the nearest picosecond, at least 1 if positive."""
        delay_ps = max(nearest_ps(delay), 1) if delay > 0 else 0
        return self.call_at_ps(self.now_ps + delay_ps, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """At the nearest picosecond whose ``time()`` is not before ``when``: none fires early."""
        at_ps = nearest_ps(when) - self._origin_ps
        while (self._origin_ps + at_ps) / PS_PER_S < when:
            at_ps += 1
        return self.call_at_ps(max(at_ps, self.now_ps), callback, *args, context=context)

    def call_at_ps(
        self,
        at_ps: int,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
        silence_ps: int = 0,
    ) -> asyncio.TimerHandle:
        """At an instant, which must not lie in the past nor beyond int64 picoseconds. ``silence_ps``: the
        caller's promise, see ``vtime.agenda``."""
        assert self.now_ps <= at_ps < NEVER_PS, (self.now_ps, at_ps)
        when = (self._origin_ps + at_ps) / PS_PER_S
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        handle._scheduled = True  # type: ignore[attr-defined]  # asyncio's, not in its stub
        self.agenda.add_timer(at_ps, _run_timer, handle, silence_ps)
        if self._self_granted and not self._pumping:
            self._arm_pump()
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        if handle._scheduled:  # type: ignore[attr-defined]  # one that ran has left the heap
            self._event_cancelled()

    def _event_cancelled(self) -> None:
        self._cancelled_timers += 1
        heap = self.agenda.heap
        if self._cancelled_timers > 100 and 2 * self._cancelled_timers > len(heap):
            self.agenda.discard(_is_cancelled)
            self._cancelled_timers = 0

    async def sleep_ps(self, delay_ps: int) -> None:
        """Sleep exactly so many picoseconds; 0 yields once."""
        await self.sleep_until_ps(self.now_ps + delay_ps)

    async def sleep_until_ps(self, at_ps: int) -> None:
        """Sleep until an instant; an instant in the past is a bug of the caller."""
        assert self.now_ps <= at_ps < NEVER_PS, (self.now_ps, at_ps)
        future: VirtualFuture[None] = VirtualFuture(loop=self)
        self.agenda.add_timer(at_ps, _end_sleep, future)
        if self._self_granted and not self._pumping:
            self._arm_pump()
        try:
            await future
        except BaseException:
            self._event_cancelled()
            raise

    # --- holds ------------------------------------------------------------------------------------

    def run_in_executor(  # type: ignore[override]  # uvloop's stub has other names
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """asyncio's call: a hold of no virtual duration. The executor must be one of threads."""
        return self.hold(func, *args, executor=executor)

    def hold(
        self,
        func: Callable[..., T],
        *args: Any,
        duration_ps: int = 0,
        executor: concurrent.futures.Executor | None = None,
        on_disk: bool = False,
    ) -> asyncio.Future[T]:
        """Run ``func`` on a thread; its future is set ``duration_ps`` from now.

        The clock may reach that instant but not pass it until the thread is done; cancelling the
        future does not end the hold. Jobs of one instant finish in order of submission. ``on_disk``:
        it leaves something that outlives the process, so the window is not reported before it is
        done (a crash later then finds what a planned kill at that instant would find).
        """
        if executor is None:
            executor = self._own_threads()
        hold = Hold(self)
        self._holds[hold] = None
        hold.thread = executor.submit(_run_held, hold, func, args)
        if on_disk:
            self._disk_holds.append(hold)
        self.agenda.add_timer(self.now_ps + duration_ps, _end_hold, hold)
        if self._self_granted and not self._pumping:
            self._arm_pump()
        return hold.future

    def _own_threads(self) -> concurrent.futures.ThreadPoolExecutor:
        if self._threads is None:
            self._threads = concurrent.futures.ThreadPoolExecutor(4, "hold")
        return self._threads

    def hold_ended(self, hold: Hold) -> None:
        """A hold's instant came: what its thread called runs now."""
        del self._holds[hold]
        self._ready.extend(hold.called)

    def threads_done(self) -> bool:
        """No held thread runs. False: ``resume`` is called when one has ended."""
        for hold in self._holds:
            assert hold.thread is not None
            if not hold.thread.done():
                hold.thread.add_done_callback(self._wake)
                return False
        return True

    def disk_done(self) -> bool:
        """No ``on_disk`` job runs. False: ``resume`` is called when one has ended."""
        while self._disk_holds:
            thread = self._disk_holds[-1].thread
            assert thread is not None
            if not thread.done():
                thread.add_done_callback(self._wake)
                return False
            self._disk_holds.pop()
        return True

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=True)
            self._threads = None

    # --- draining ---------------------------------------------------------------------------------

    def next_at_ps(self) -> int:
        """The instant of the next event: now if callbacks wait, NEVER_PS if nothing will happen."""
        if self._ready or self._instant:
            return self.now_ps
        heap = self.agenda.heap
        while heap and _is_cancelled(heap[0]):
            self.agenda.drop_head()
        return self.agenda.next_at_ps()

    def reaction_ps(self) -> int:
        """The earliest instant at which something may leave because of an event that is left."""
        if self._ready or self._instant:
            return self.now_ps
        return self.agenda.reaction_ps(_is_cancelled)

    def run_until(self, horizon_ps: int) -> bool:
        """Run all events before the horizon. False: a thread must end first; ``resume`` is called
        then, and calling again goes on exactly where it stopped. Raises what an event raised; the
        loop stays drainable."""
        if self.now_ps >= horizon_ps:  # a stop at the start: what waits now is not before it
            return True
        self._horizon_ps = horizon_ps
        ready, heap, instant = self._ready, self.agenda.heap, self._instant
        take_instant = self.agenda.take_instant
        while not self._stop_asked:
            while instant:
                event = instant[0]
                run, item = event[4], event[5]
                if run is _end_hold and not item.thread.done():
                    item.thread.add_done_callback(self._wake)
                    return False
                instant.popleft()
                run(item)
            if ready:
                self._run_ready(ready)
                if not (heap and heap[0][0] <= self.now_ps):
                    continue
            elif not heap or heap[0][0] >= horizon_ps:
                return True
            take_instant(instant)
            self.events_run += len(instant)
            if instant[0][0] > self.now_ps:
                self.now_ps = instant[0][0]
                self._spins = 0
                if self.callbacks_run + self.events_run > self._gc_at:
                    self._gc_at = self.callbacks_run + self.events_run + GC_EVERY
                    gc.collect()
            else:
                self._count_spins(len(instant))
        return True

    def advance(self, at_ps: int) -> bool:
        """From within an event: move the clock to an instant if nothing is due up to it. Who gets
        True may do there what it would have made an event for; the order is the same."""
        heap = self.agenda.heap
        if self._ready or self._instant or not self.now_ps < at_ps < self._horizon_ps:
            return False
        if heap and heap[0][0] <= at_ps:
            return False
        self.now_ps = at_ps
        self._spins = 0
        self.events_run += 1
        return True

    def _run_ready(self, ready: deque[asyncio.Handle]) -> None:
        count = len(ready)
        self._count_spins(count)
        self.callbacks_run += count
        for _ in range(count):
            handle = ready.popleft()
            if not handle._cancelled:
                try:  # as Handle._run, without its call
                    handle._context.run(handle._callback, *handle._args)  # type: ignore[attr-defined]  # asyncio's own, as its loops use it
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:
                    self._callback_raised(handle, error)

    def _callback_raised(self, handle: asyncio.Handle, error: BaseException) -> None:
        callback = handle._callback  # type: ignore[attr-defined]  # asyncio's own, as its loops use it
        message = f"Exception in callback {callback!r}"
        self.call_exception_handler({"message": message, "exception": error, "handle": handle})

    def _count_spins(self, count: int) -> None:
        self._spins += count
        if self._spins > self.spin_limit:
            self._spins = 0
            raise SpinError(f"{self.spin_limit} callbacks at {format_ps(self.now_ps)}")

    def due(self) -> list[Callable[..., Any]]:
        """What is still to run at this instant, for the words of a watchdog."""
        handles = [*self._ready, *[e[5] for e in self._instant if e[4] is _run_timer]]
        callbacks = [handle._callback for handle in handles]
        return callbacks + [e[4] for e in self._instant if e[4] is not _run_timer]

    def _wake(self, _: object) -> None:
        uvloop.Loop.call_soon_threadsafe(self, self._resume_native)

    def _resume_native(self) -> None:
        self.resume()

    # --- running alone ----------------------------------------------------------------------------

    def run_forever(self) -> None:
        """Without a conductor the loop grants itself everything; with one (``resume`` replaced) it
        only serves the native readers until ``stop``."""
        self._stop_asked = False
        self._failure = None
        self._self_granted = self.resume == self._pump
        if self._self_granted:
            self._arm_pump()
        try:
            super().run_forever()
        finally:
            self._self_granted = False
            self._stop_asked = False
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Stop after the callbacks of this turn."""
        self._stop_asked = True
        super().stop()

    def _arm_pump(self) -> None:
        self._pumping = True
        super().call_soon(self._pump)

    def _pump(self) -> None:
        self._pumping = True
        try:
            if self.run_until(NEVER_PS) and not self._stop_asked:
                raise DeadlockError(f"nothing will ever happen after {format_ps(self.now_ps)}")
        except BaseException as error:  # uvloop would log it; run_forever raises it
            self._failure = error
            self.stop()
        finally:
            self._pumping = False

    # --- the outside world ------------------------------------------------------------------------

    def native_reader(self, fd: int, callback: Callable[..., Any], *args: Any) -> None:
        """uvloop's add_reader, for the mesh and the control socket only."""
        super().add_reader(fd, callback, *args)

    def native_reader_gone(self, fd: int) -> None:
        super().remove_reader(fd)

    def native_writer(self, fd: int, callback: Callable[..., Any], *args: Any) -> None:
        """uvloop's add_writer, for the mesh only."""
        super().add_writer(fd, callback, *args)

    def native_writer_gone(self, fd: int) -> None:
        super().remove_writer(fd)


def _run_timer(handle: asyncio.TimerHandle) -> None:
    handle._scheduled = False  # type: ignore[attr-defined]  # asyncio's own, as its loops use it
    if not handle._cancelled:
        handle._run()


def _is_cancelled(event: Event) -> bool:
    run, item = event[4], event[5]
    return bool(item._cancelled if run is _run_timer else run is _end_sleep and item.done())


def _end_sleep(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _end_hold(hold: Hold) -> None:
    assert hold.thread is not None
    hold.loop.hold_ended(hold)
    if hold.future.cancelled():
        return
    error = hold.thread.exception()
    if error is not None:
        hold.future.set_exception(error)
    else:
        hold.future.set_result(hold.thread.result())


def _run_held(hold: Hold, func: Callable[..., T], args: tuple[Any, ...]) -> T:
    _in_hold.hold = hold
    try:
        return func(*args)
    finally:
        _in_hold.hold = None


outside.override(VirtualLoop)
