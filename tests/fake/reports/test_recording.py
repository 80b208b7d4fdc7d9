"""``amp_fx.record()`` sees what is compiled inside it, from any thread."""

from __future__ import annotations

import threading

import pytest

from amp_fx import Plan, Report, record
from amp_fx.plans.reading import publish


def test_a_recording_holds_the_plans_published_inside_it_in_order_and_a_report_of_each() -> None:
    first, second, outside = Plan("first"), Plan("second"), Plan("outside")
    publish(outside)
    with record() as recording:
        publish(first)
        publish(second)
    publish(outside)
    assert recording.plans == [first, second]
    assert recording.reports == [Report([first]), Report([second])]


def test_recordings_nest() -> None:
    with record() as outer:
        publish(Plan("a"))
        with record() as inner:
            publish(Plan("b"))
        publish(Plan("c"))
    assert [plan.graph for plan in outer.plans] == ["a", "b", "c"]
    assert [plan.graph for plan in inner.plans] == ["b"]


def test_two_recordings_with_equal_contents_are_two_recordings() -> None:
    with record() as outer, record() as inner:
        pass
    with record() as last:
        publish(Plan())
    assert (outer.plans, inner.plans, len(last.plans)) == ([], [], 1)


def test_a_recording_closes_when_its_block_raises() -> None:
    with pytest.raises(ZeroDivisionError), record() as recording:
        raise ZeroDivisionError
    publish(Plan())
    assert recording.plans == []


def test_plans_from_other_threads_are_recorded_while_recordings_open_and_close() -> None:
    counts: list[int] = []

    def publish_many(name: str) -> None:
        for _ in range(50):
            with record() as inner:
                publish(Plan(name))
            counts.append(len(inner.plans))

    with record() as recording:
        threads = [threading.Thread(target=publish_many, args=(str(index),)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    names = [plan.graph for plan in recording.plans]
    assert sorted(names) == sorted(str(index) for index in range(4) for _ in range(50))
    assert len(counts) == 200
    assert min(counts) >= 1
