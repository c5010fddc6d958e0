"""A stream's rules: handshake, ends, resets, and every byte in order exactly once over a bad wire."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cmnet.units import NEVER_PS
from planes.vpc_halves import ACK, DATA, PROBE, RST, SYN, SYN_ACK, Limits, Message
from planes.vpc_stream import TRANSITIONS, Failure, State
from tests.planes.vpc_pair import LIMITS, MS, PROPAGATION_PS, Pair, Wire


def lose(*kinds: int, first: int = 10**9) -> Wire:
    """A wire that loses the first so many messages of these kinds."""
    left = [first]

    def wire(_: int, message: Message) -> list[int]:
        if message.kind in kinds and left[0]:
            left[0] -= 1
            return []
        return [PROPAGATION_PS]

    return wire


def times_ps(pair: Pair, kind: int) -> list[int]:
    return [at_ps for at_ps, _, message in pair.sent if message.kind == kind]


def test_a_handshake_is_one_round_trip_and_half_a_one_more_for_the_accepter() -> None:
    """The opener may write after one round trip; the accepter hears of it one propagation later."""
    pair = Pair()
    pair.ask()
    pair.run(2 * PROPAGATION_PS - 1)
    assert (pair.opener.state, pair.accepter.state) == (State.OPENING, State.ACCEPTING)
    pair.run(2 * PROPAGATION_PS)
    assert (pair.opener.state, pair.accepter.state) == (State.OPEN, State.ACCEPTING)
    pair.run(3 * PROPAGATION_PS)
    assert pair.accepter.state is State.OPEN
    assert [message.kind for _, _, message in pair.sent] == [SYN, SYN_ACK, ACK]


def test_nothing_is_awaited_on_an_open_stream_that_is_silent() -> None:
    """An idle hour costs no event."""
    pair = Pair().open()
    pair.write(0, b"x")
    pair.run()
    assert pair.opener.next_at_ps() == pair.accepter.next_at_ps() == NEVER_PS


@pytest.mark.parametrize("kind", [SYN, SYN_ACK])
def test_a_lost_greeting_is_said_again_after_the_timeout(kind: int) -> None:
    """Either loss costs the opener 200 ms; then the stream is as good as any."""
    pair = Pair(wire=lose(kind, first=1))
    pair.ask()
    pair.run(200 * MS + 2 * PROPAGATION_PS)
    assert pair.opener.state is State.OPEN
    pair.write(0, b"hello")
    pair.run()
    assert bytes(pair.ends[1].received) == b"hello"


def test_a_lost_end_of_the_handshake_is_made_up_by_the_first_chunk() -> None:
    """The accepter need not see the acknowledgement if bytes say the same."""
    pair = Pair(wire=lose(ACK, first=1))
    pair.ask()
    pair.run(2 * PROPAGATION_PS)
    pair.write(0, b"hello")
    pair.run(4 * PROPAGATION_PS)
    assert pair.accepter.state is State.OPEN
    assert bytes(pair.ends[1].received) == b"hello"


def test_a_lost_end_of_the_handshake_is_asked_for_when_the_accepter_must_speak_first() -> None:
    """SYN-ACK again after 200 ms, and the opener, long open, acknowledges once more."""
    pair = Pair(wire=lose(ACK, first=1))
    pair.ask()
    pair.run()
    assert pair.accepter.state is State.OPEN
    assert times_ps(pair, SYN_ACK) == [PROPAGATION_PS, PROPAGATION_PS + 200 * MS]


def test_nobody_listens() -> None:
    """Refused after one round trip."""
    pair = Pair()
    pair.listening = False
    pair.ask()
    pair.run()
    assert (pair.now_ps, pair.opener.failure) == (2 * PROPAGATION_PS, Failure.REFUSED)


def test_nobody_answers() -> None:
    """Six SYNs at 0, 0.2, 0.6, 1.4, 3.0 and 6.2 s, then the failure at 12.6 s."""
    pair = Pair(wire=lose(SYN))
    pair.ask()
    pair.run()
    assert times_ps(pair, SYN) == [at * MS for at in (0, 200, 600, 1400, 3000, 6200)]
    assert (pair.now_ps, pair.opener.failure) == (12_600 * MS, Failure.UNREACHABLE)


def test_a_chunk_that_is_never_acknowledged_is_sent_six_times() -> None:
    """The schedule is exact: waits of 200 ms, doubled; at 12.6 s the stream fails."""
    pair = Pair().open()
    pair.wire = lose(DATA)
    start_ps = pair.now_ps
    pair.write(0, b"lost")
    pair.run()
    sent = [(at_ps - start_ps, data) for at_ps, _, data in pair.chunks(0)]
    assert sent == [(at * MS, b"lost") for at in (0, 200, 600, 1400, 3000, 6200)]
    assert pair.now_ps - start_ps == 12_600 * MS
    assert (pair.opener.state, pair.opener.failure) == (State.CLOSED, Failure.LOST)
    assert pair.accepter.state is State.OPEN, "the accepter has no way to know"


def test_tries_count_anew_after_progress() -> None:
    """Two chunks, each lost three times: neither is near six tries, and waits begin at 200 ms."""
    pair = Pair().open()
    losses = {0: 3, 100: 3}

    def wire(_: int, message: Message) -> list[int]:
        if message.kind == DATA and losses.get(message.sequence, 0):
            losses[message.sequence] -= 1
            return []
        return [PROPAGATION_PS]

    pair.wire = wire
    start_ps = pair.now_ps
    pair.write(0, b"a" * 100 + b"b" * 100)
    pair.run()
    assert bytes(pair.ends[1].received) == b"a" * 100 + b"b" * 100
    first = [at_ps - start_ps for at_ps, sequence, _ in pair.chunks(0) if sequence == 0]
    assert first == [0, 200 * MS, 600 * MS, 1400 * MS]
    acked_ps = 1400 * MS + 2 * PROPAGATION_PS
    second = [at_ps - start_ps for at_ps, sequence, _ in pair.chunks(0) if sequence == 100]
    assert second[1:] == [acked_ps, acked_ps + 200 * MS, acked_ps + 600 * MS]


def test_all_that_was_lost_together_is_resent_one_round_trip_each() -> None:
    """After a timeout progress itself says that the next is missing: no second 200 ms."""
    pair = Pair().open()
    pair.wire = lose(DATA, first=5)
    start_ps = pair.now_ps
    pair.write(0, bytes(range(100)) * 5)
    pair.run()
    assert bytes(pair.ends[1].received) == bytes(range(100)) * 5
    resent = [at_ps - start_ps for at_ps, _, _ in pair.chunks(0)[5:]]
    assert resent == [200 * MS + trip * 2 * PROPAGATION_PS for trip in range(5)]


def test_only_the_missing_chunk_is_resent() -> None:
    """What came early is kept: one loss of many costs one chunk."""
    pair = Pair().open()
    pair.wire = lose(DATA, first=1)
    pair.write(0, b"abcdefgh" * 100)
    pair.run()
    assert bytes(pair.ends[1].received) == b"abcdefgh" * 100
    assert pair.opener.outgoing.chunks_resent == 1


def test_a_lost_acknowledgement_is_told_again_to_whoever_resends() -> None:
    """The copy is thrown away and acknowledged at once."""
    pair = Pair().open()
    pair.wire = lose(ACK, first=1)
    pair.write(0, b"once")
    pair.run()
    assert bytes(pair.ends[1].received) == b"once"
    assert (pair.opener.outgoing.chunks_resent, pair.accepter.incoming.duplicates) == (1, 1)
    assert pair.opener.outgoing.acked == 4


def test_the_end_comes_after_what_was_written_before_it() -> None:
    """A half-close with bytes in flight: all of them, then the end; the other half goes on."""
    pair = Pair().open()
    pair.write(0, b"x" * 950)
    pair.finish(0)
    pair.run()
    assert len(pair.ends[1].received) == 950
    assert pair.ends[1].ended
    assert pair.opener.outgoing.over()
    pair.write(1, b"answer")
    pair.finish(1)
    pair.run()
    assert bytes(pair.ends[0].received) == b"answer"
    assert pair.ends[0].ended


def test_a_lost_end_is_resent() -> None:
    """The end takes a sequence number, so it is acknowledged and resent like a byte."""
    pair = Pair().open()
    pair.wire = lose(DATA, first=1)
    pair.finish(0)
    pair.run()
    assert pair.ends[1].ended


def test_both_close_at_once() -> None:
    """Both ends are over, neither failed, nothing is awaited."""
    pair = Pair().open()
    pair.write(0, b"a")
    pair.write(1, b"b")
    pair.run()
    pair.close(0)
    pair.close(1)
    pair.run()
    assert [end.stream.state for end in pair.ends] == [State.CLOSED, State.CLOSED]
    assert [end.stream.failure for end in pair.ends] == [None, None]


def test_both_close_at_once_while_every_first_try_is_lost() -> None:
    """Losses make it slower, not wrong."""
    pair = Pair().open()
    pair.wire = lose(DATA, ACK, first=4)
    pair.close(0)
    pair.close(1)
    pair.run()
    assert [end.stream.state for end in pair.ends] == [State.CLOSED, State.CLOSED]
    assert [end.stream.failure for end in pair.ends] == [None, None]


def test_a_reset_fails_the_other_end_at_once() -> None:
    """One propagation after the abort."""
    pair = Pair().open()
    pair.opener.abort()
    pair.poll(0)
    pair.run()
    assert (pair.opener.failure, pair.accepter.failure) == (None, Failure.RESET)


def test_a_reset_after_both_ends_came_is_no_failure() -> None:
    """The peer is done and forgot us before our last acknowledgement: nothing is missing."""
    pair = Pair().open()
    pair.finish(0)
    pair.finish(1)
    pair.run()
    pair.accepter.receive(Message(RST), pair.now_ps)
    assert (pair.accepter.state, pair.accepter.failure) == (State.CLOSED, None)


def test_bytes_for_an_end_that_closed_are_answered_by_a_reset() -> None:
    """Nobody will ever read them; the writer must learn it."""
    pair = Pair().open()
    pair.close(1)
    pair.run()
    assert pair.ends[0].ended
    pair.accepter.deaf = True
    pair.accepter.state = State.OPEN  # as if the acknowledgement of its end were still on its way
    pair.write(0, b"too late")
    pair.run()
    assert pair.opener.failure is Failure.RESET


def test_a_reader_that_pauses_stops_its_sender_at_the_window() -> None:
    """The window is full and not one byte more leaves; reading on lets all of it through."""
    pair = Pair().open()
    pair.ends[1].reading = False
    pair.write(0, b"w" * 5000)
    pair.run(pair.now_ps + 150 * MS)
    assert pair.opener.outgoing.cut == LIMITS.window_bytes
    assert pair.opener.outgoing.acked == LIMITS.window_bytes, "what waits unread is acknowledged"
    pair.resume(1)
    pair.run()
    assert len(pair.ends[1].received) == 5000


def test_a_closed_window_is_probed_for_ever_while_the_peer_answers() -> None:
    """Waits double up to the last one of a failing stream (6.4 s); a living peer is never given up."""
    pair = Pair().open()
    pair.ends[1].reading = False
    start_ps = pair.now_ps
    pair.write(0, b"w" * 5000)
    pair.run(start_ps + 100_000 * MS)
    assert pair.opener.state is State.OPEN
    probes = times_ps(pair, PROBE)
    waits = [later - earlier for earlier, later in itertools.pairwise(probes)]
    assert {wait_ps // (100 * MS) for wait_ps in waits[6:]} == {64}
    pair.resume(1)
    pair.run()
    assert len(pair.ends[1].received) == 5000


def test_a_lost_window_update_is_found_by_a_probe() -> None:
    """Without the probe both ends would wait for ever."""
    pair = Pair().open()
    pair.ends[1].reading = False
    pair.write(0, b"w" * 1700)
    pair.run(pair.now_ps + 100 * MS)
    pair.wire = lose(ACK, first=1)
    pair.resume(1)
    pair.run()
    assert len(pair.ends[1].received) == 1700
    assert len(times_ps(pair, PROBE)) == 1


def test_a_closed_window_of_a_dead_peer_is_given_up() -> None:
    """Probes that nobody answers count as tries."""
    pair = Pair().open()
    pair.ends[1].reading = False
    pair.write(0, b"w" * 5000)
    pair.run(pair.now_ps + 100 * MS)
    pair.wire = lambda _, __: []
    pair.run()
    assert pair.opener.failure is Failure.LOST
    assert len(times_ps(pair, PROBE)) == 5


def test_the_time_that_the_window_held_bytes_back_is_counted() -> None:
    """From the instant that the window was full to the instant that news of room came."""
    pair = Pair().open()
    pair.ends[1].reading = False
    pair.write(0, b"w" * 1700)
    full_ps = pair.now_ps + 16 * 100_000
    pair.run(pair.now_ps + 100 * MS)
    resumed_ps = pair.now_ps
    pair.resume(1)
    pair.run()
    assert pair.opener.outgoing.limited_ps(pair.now_ps) == resumed_ps + PROPAGATION_PS - full_ps


def test_the_window_holds_charged_bytes() -> None:
    """A side that charges 10 per carried byte fills the window with a tenth of the bytes."""
    factor = Limits(
        chunk_bytes=100, window_bytes=1600, timeout_ps=200 * MS, tries=6, charge_factor=10
    )
    pair = Pair(factor, other=LIMITS).open()
    pair.ends[1].reading = pair.ends[0].reading = False
    pair.write(0, b"w" * 1000)
    pair.write(1, b"w" * 5000)
    pair.run(pair.now_ps + 100 * MS)
    assert (pair.opener.outgoing.cut, pair.accepter.outgoing.cut) == (160, 1600)
    assert {len(data) for _, _, data in pair.chunks(0)} == {10}


def test_a_greeting_that_comes_twice_is_answered_twice_and_opens_once() -> None:
    """Duplicates of the handshake change nothing."""
    pair = Pair(wire=lambda _, __: [PROPAGATION_PS, PROPAGATION_PS + 5])
    pair.ask()
    pair.run()
    pair.write(0, b"hello")
    pair.run()
    assert bytes(pair.ends[1].received) == b"hello"


def test_a_second_syn_is_answered_at_once() -> None:
    """The opener's timeout says that the first answer was lost: no need to wait for ours."""
    pair = Pair(wire=lambda _, __: []).open()
    pair.accepter.accept(Message(SYN, 80, 1), 0)
    pair.accepter.control.clear()
    pair.accepter.receive(Message(SYN, 80, 1), 5)
    assert [message.kind for message in pair.accepter.control] == [SYN_ACK]


def test_an_aborted_opening_asks_no_more() -> None:
    """Only a reset leaves; no SYN follows it."""
    pair = Pair(wire=lambda _, __: [])
    pair.ask()
    pair.opener.abort()
    assert pair.opener.next_at_ps() == NEVER_PS


def test_an_orderly_end_resends_nothing() -> None:
    """Whoever is over first acknowledges the other's end before it forgets the stream."""
    pair = Pair().open()
    pair.close(0)
    pair.close(1)
    pair.run(pair.now_ps + 10 * PROPAGATION_PS)
    assert [end.stream.state for end in pair.ends] == [State.CLOSED, State.CLOSED]
    pair = Pair().open()
    pair.close(0)
    pair.run(pair.now_ps + PROPAGATION_PS)
    pair.close(1)
    pair.run(pair.now_ps + 10 * PROPAGATION_PS)
    assert [end.stream.state for end in pair.ends] == [State.CLOSED, State.CLOSED]
    assert [end.stream.failure for end in pair.ends] == [None, None]


def test_an_end_that_answers_an_end_is_acknowledged_by_who_is_then_over() -> None:
    """Three messages end a stream whose two sides close one upon the other, and no reset."""
    pair = Pair().open()
    first, second = pair.opener, pair.accepter
    first.close()
    end = first.next_chunk(0)
    assert end is not None
    second.receive(end, 0)
    second.close()
    answer = second.next_chunk(0)
    assert answer is not None
    first.receive(answer, 0)
    assert ([message.kind for message in first.control], first.state) == ([ACK], State.CLOSED)
    second.receive(first.control[0], 0)
    assert (second.state, second.control) == (State.CLOSED, [])


def test_every_state_and_kind_has_one_answer() -> None:
    """The table names all that moves a stream; nothing leads out of CLOSED or into OPENING."""
    kinds = {SYN, SYN_ACK, ACK, PROBE, DATA, RST}
    assert {kind for _, kind in TRANSITIONS} <= kinds
    assert State.CLOSED not in {state for state, _ in TRANSITIONS}
    assert State.OPENING not in set(TRANSITIONS.values())


FATES = st.lists(
    st.sampled_from(
        [
            [],
            [PROPAGATION_PS],
            [PROPAGATION_PS, PROPAGATION_PS],
            [PROPAGATION_PS, 40 * PROPAGATION_PS],
            [3 * PROPAGATION_PS],
            [PROPAGATION_PS * 90],
        ]
    ),
    max_size=150,
)
SCRIPT = st.lists(
    st.tuples(
        st.sampled_from(["write 0", "write 1", "pause 0", "pause 1", "resume 0", "resume 1"]),
        st.integers(1, 700),
        st.integers(0, 300 * MS),
    ),
    max_size=25,
)


@pytest.mark.slow
@settings(deadline=None, max_examples=120)
@given(fates=FATES, script=SCRIPT)
def test_all_bytes_arrive_in_order_once_or_the_stream_fails(
    fates: list[list[int]], script: list[tuple[str, int, int]]
) -> None:
    """Whatever a wire loses, doubles, delays and swaps: a prefix is right, and the end means all."""
    coming = iter(fates)
    pair = Pair(wire=lambda _, __: next(coming, [PROPAGATION_PS]))
    pair.ask()
    written = [bytearray(), bytearray()]
    pair.run(100 * PROPAGATION_PS)
    for action, size, wait_ps in script:
        word, index = action.split()
        end = int(index)
        if pair.ends[end].stream.state is not State.OPEN:
            continue
        if word == "write":
            data = bytes((len(written[end]) + at) % 251 for at in range(size))
            written[end] += data
            pair.write(end, data)
        else:
            pair.ends[end].reading = word == "resume"
            pair.poll(end)
        pair.run(pair.now_ps + wait_ps)
    for end in (0, 1):
        pair.finish(end)
        pair.resume(end)
    pair.run()
    for end in (0, 1):
        got, sent = bytes(pair.ends[1 - end].received), bytes(written[end])
        assert got == sent[: len(got)]
        if pair.ends[1 - end].ended:
            assert got == sent
    if pair.opener.failure is None and pair.accepter.state is State.OPEN:
        assert all(end.ended for end in pair.ends)


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(fates=FATES, size=st.integers(0, 4000))
def test_a_loss_that_ends_is_survived(fates: list[list[int]], size: int) -> None:
    """Four losses in a row at most are less than six tries: the stream never fails."""
    coming = iter(fates)
    row = [0]

    def wire(_: int, __: Message) -> list[int]:
        fate = next(coming, [PROPAGATION_PS])
        row[0] = 0 if fate else row[0] + 1
        return fate if fate or row[0] <= 4 else [PROPAGATION_PS]

    pair = Pair(wire=wire)
    pair.ask()
    pair.run(1000 * MS)
    pair.run(10_000 * MS)
    if pair.opener.state is State.OPEN:
        data = bytes(at % 251 for at in range(size))
        pair.write(0, data)
        pair.finish(0)
        pair.run()
        assert bytes(pair.ends[1].received) == data
        assert pair.ends[1].ended
