"""The watchdog speaks when nothing moves, and only then."""

import time

from rrl.rollout.watchdog import Watchdog


def test_a_standstill_is_told_with_its_stage(caplog):
    with Watchdog(0.05, lambda: 3, lambda: "host 0 waits for searches"):
        time.sleep(0.2)
    assert "has not moved for 0.05 s: host 0 waits for searches" in caplog.text


def test_what_moves_is_left_alone(caplog):
    with Watchdog(0.2, lambda: time.perf_counter_ns(), lambda: "moving"):
        time.sleep(0.5)
    with Watchdog(0, lambda: 0, lambda: "never asked"):
        time.sleep(0.05)
    assert not caplog.text
