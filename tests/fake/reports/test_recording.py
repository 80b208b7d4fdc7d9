"""``amp_fx.record()`` sees what is compiled inside it, from any thread."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

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


def test_recordings_nest_and_those_with_equal_contents_are_two() -> None:
    # what closes is the inner one, although they are equal then
    with record() as outer:
        with record() as inner:
            pass
        publish(Plan("a"))
        with record() as second:
            publish(Plan("b"))
        publish(Plan("c"))
    publish(Plan("d"))
    assert [[plan.graph for plan in each.plans] for each in (outer, inner, second)] == [
        ["a", "b", "c"],
        [],
        ["b"],
    ]


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

    with record() as recording, ThreadPoolExecutor(4) as threads:
        list(threads.map(publish_many, "0123"))
    assert Counter(plan.graph for plan in recording.plans) == dict.fromkeys("0123", 50)
    assert len(counts) == 200
    assert min(counts) >= 1
