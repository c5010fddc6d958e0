"""Every process is asked once, and the end comes when none is left."""

from __future__ import annotations

from cmnet.launch.closing import Closing


class Asked:
    """What a Closing did."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.ends: list[str] = []
        self.closing = Closing(self.order.append, self._end)

    def _end(self) -> None:
        self.ends.append("end")


def test_one_is_asked_after_the_other() -> None:
    told = Asked()
    told.closing.begin([4, 2, 7], at_once=False)
    assert told.order == [4] and told.closing.asked == {4}
    told.closing.answered(4)
    assert told.order == [4, 2] and told.ends == []
    told.closing.answered(2)
    told.closing.answered(7)
    assert told.order == [4, 2, 7] and told.ends == ["end"]


def test_all_are_asked_at_once() -> None:
    told = Asked()
    told.closing.begin([4, 2], at_once=True)
    assert told.order == [4, 2] and told.closing.asked == {2, 4}
    told.closing.answered(2)
    assert told.ends == []
    told.closing.answered(4)
    assert told.ends == ["end"]


def test_who_dies_is_not_asked_and_holds_nothing_up() -> None:
    told = Asked()
    told.closing.begin([1, 2, 3], at_once=False)
    told.closing.answered(2)
    assert told.order == [1]
    told.closing.answered(1)
    assert told.order == [1, 3]
    told.closing.answered(3)
    assert told.ends == ["end"]


def test_nobody_lives() -> None:
    told = Asked()
    told.closing.begin([], at_once=False)
    assert told.ends == ["end"]
