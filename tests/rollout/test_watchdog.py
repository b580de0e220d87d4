"""The watchdog reports a stall as an error, and long computations as information."""

import time

import pytest

from rrl.rollout.watchdog import MAX_COMPUTING_REPORTS, Watchdog


class Rollout:
    """What a watchdog observes, and its clock: a tenth of the limit of 300 s passes between checks."""

    def __init__(self):
        self.exchanges, self.preparing, self.computing, self.now, self.used = 0, "", True, 0.0, 0.0
        stage = "scheduler 0 waiting for the device"
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


def test_a_stall_is_logged_with_its_description(caplog):
    with Watchdog(0.05, lambda: 3, lambda: "scheduler 0 waits for searches"):
        time.sleep(0.2)
    assert "made no progress for 0.05 s: scheduler 0 waits for searches" in caplog.text


def test_progress_or_a_limit_of_zero_is_never_reported(caplog):
    with Watchdog(0.2, lambda: time.perf_counter_ns(), lambda: "moving"):
        time.sleep(0.5)
    with Watchdog(0, lambda: 0, lambda: "never checked"):
        time.sleep(0.05)
    assert not caplog.text


def test_a_device_without_cpu_time_has_stalled(rollout, caplog):
    rollout.wait(270)
    assert not caplog.records
    rollout.wait(330)
    message = "the rollout made no progress for 300 s: scheduler 0 waiting for the device"
    assert caplog.messages == [message, message] and levels(caplog) == ["ERROR", "ERROR"]


def test_long_compilation_is_no_stall(rollout, caplog):
    rollout.preparing = "compiling 1 rollout workers"
    rollout.wait(30)
    rollout.wait(3000)
    assert levels(caplog) == ["INFO"] * 10
    assert caplog.messages[-1] == "the rollout has not begun; for 3000 s: compiling 1 rollout workers"


def test_the_clock_starts_when_compilation_has_ended(rollout, caplog):
    rollout.preparing = "compiling"
    rollout.wait(300)
    rollout.preparing = ""
    rollout.wait(270)
    assert not caplog.records
    rollout.wait(60)
    assert levels(caplog) == ["ERROR"]


def test_a_long_decode_step_is_no_stall(rollout, caplog):
    rollout.wait(600, cores=0.2)
    assert levels(caplog) == ["INFO", "INFO"]
    assert caplog.messages[0] == (
        "the device has been computing for 300 s, on 0.2 cores: scheduler 0 waiting for the device"
    )
    rollout.exchanges += 1
    rollout.wait(300, cores=0.2)
    assert levels(caplog) == ["INFO", "INFO"]


def test_a_device_that_computes_too_long_has_stalled(rollout, caplog):
    rollout.wait(300 * (MAX_COMPUTING_REPORTS + 1), cores=2.0)
    assert (
        levels(caplog)[: MAX_COMPUTING_REPORTS - 1] == ["INFO"] * (MAX_COMPUTING_REPORTS - 1)
        and levels(caplog)[-1] == "ERROR"
    )


def test_cpu_time_counts_only_while_the_device_computes(rollout, caplog):
    rollout.computing = False
    rollout.wait(330, cores=1.0)
    assert levels(caplog) == ["ERROR"]
