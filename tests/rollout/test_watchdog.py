"""The watchdog reports a stall as an error, and nothing else."""

import time

import pytest

from rrl.rollout.watchdog import MAX_COMPUTING_REPORTS, Watchdog


class Rollout:
    """What a watchdog sees, and its clock: a tenth of the limit of 300 s passes at each look."""

    def __init__(self):
        self.exchanges, self.preparing, self.computing, self.now, self.used = 0, "", True, 0.0, 0.0
        stage = "host 0 waiting for the device"
        self.watchdog = Watchdog(
            300, lambda: self.exchanges, lambda: stage, lambda: self.preparing, lambda: self.computing
        )
        self.watchdog.begin(0.0, 0.0)

    def wait(self, seconds, cores=0.0):
        for _ in range(round(seconds / 30)):
            self.now, self.used = self.now + 30, self.used + 30 * cores
            self.watchdog.check(self.now, self.used)


@pytest.fixture
def rollout(caplog):
    caplog.set_level("INFO", "rrl.rollout.watchdog")
    return Rollout()


def levels(caplog):
    return [record.levelname for record in caplog.records]


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


def test_a_device_that_uses_no_processor_time_has_stalled(rollout, caplog):
    rollout.wait(270)
    assert not caplog.records
    rollout.wait(330)
    message = "the rollout has not moved for 300 s: host 0 waiting for the device"
    assert caplog.messages == [message, message] and levels(caplog) == ["ERROR", "ERROR"]


def test_compiling_is_no_stall_however_long_it_takes(rollout, caplog):
    rollout.preparing = "compiling 1 rollout loops"
    rollout.wait(30)
    rollout.wait(3000)
    assert levels(caplog) == ["INFO"] * 10
    assert caplog.messages[-1] == "the rollout has not begun yet; for 3000 s: compiling 1 rollout loops"


def test_the_clock_of_a_stall_begins_when_compiling_has_ended(rollout, caplog):
    rollout.preparing = "compiling"
    rollout.wait(300)
    rollout.preparing = ""
    rollout.wait(270)
    assert not caplog.records
    rollout.wait(60)
    assert levels(caplog) == ["ERROR"]


def test_a_step_that_is_still_computed_is_no_stall(rollout, caplog):
    rollout.wait(600, cores=0.2)
    assert levels(caplog) == ["INFO", "INFO"]
    assert caplog.messages[0] == (
        "the device has been computing for 300 s, on 0.2 cores: host 0 waiting for the device"
    )
    rollout.exchanges += 1
    rollout.wait(300, cores=0.2)
    assert levels(caplog) == ["INFO", "INFO"]


def test_a_device_that_computes_for_ever_has_stalled(rollout, caplog):
    rollout.wait(300 * (MAX_COMPUTING_REPORTS + 1), cores=2.0)
    assert (
        levels(caplog)[: MAX_COMPUTING_REPORTS - 1] == ["INFO"] * (MAX_COMPUTING_REPORTS - 1)
        and levels(caplog)[-1] == "ERROR"
    )


def test_processor_time_of_a_host_that_is_stuck_is_no_excuse(rollout, caplog):
    rollout.computing = False
    rollout.wait(330, cores=1.0)
    assert levels(caplog) == ["ERROR"]
