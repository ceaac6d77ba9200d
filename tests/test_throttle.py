"""Failures by origin: told of until they are too many, forgiven in time, in a table of bounded size. The clock is given."""

from __future__ import annotations

from tensorlink import _core


def test_failures_are_told_of_until_they_are_too_many() -> None:
    throttle = _core.Throttle()
    burst = [throttle.failed("a", 100.0) for _ in range(_core.Throttle.BURST + 5)]
    assert burst == [False] * _core.Throttle.BURST + [True] * 5
    assert not throttle.failed("b", 100.0), "another origin has its own"
    assert throttle.untold(100.0 + _core.Throttle.TELL_S / 2) == []
    assert throttle.untold(100.0 + _core.Throttle.TELL_S) == [("a", 5)]
    assert throttle.untold(200.0) == [], "once"


def test_time_forgives() -> None:
    throttle = _core.Throttle()
    for _ in range(_core.Throttle.BURST):
        assert not throttle.failed("a", 50.0)
    assert throttle.failed("a", 50.9)
    assert not throttle.failed("a", 51.1), "one more a second"
    assert throttle.failed("a", 51.2)
    assert [throttle.failed("a", 80.0) for _ in range(_core.Throttle.BURST)] == [False] * _core.Throttle.BURST


def test_its_table_is_bounded() -> None:
    throttle, most = _core.Throttle(), _core.Throttle.ORIGINS
    for i in range(10 * most):
        throttle.failed(f"address {i}", 10.0)
    assert len(throttle) == most + 1
    assert throttle.failed("one more", 10.0), "these count together"
    assert throttle.untold(10.0 + _core.Throttle.TELL_S)[0][0] == _core.Throttle.OTHERS
    assert not throttle.failed("a new one", 100.0), "those who failed long ago are forgotten"
    assert len(throttle) == 1
