"""Metrics files stay consistent across resumes and kills, and damaged files are reported."""

import logging
import re

import numpy as np
import pytest

from rrl.errors import UserError
from rrl.runs.metrics import MetricsWriter, read_metrics, refuse_damaged_metrics
from tests.runs.event_files import scalars_of


def test_a_resumed_run_drops_lines_after_its_checkpoint(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        for step in range(1, 6):
            writer.write(step, {"loss": np.float32(step)})
    with MetricsWriter(tmp_path, resume_step=3, tensorboard=False) as writer:
        writer.write(4, {"loss": 40.0})
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4] and lines[-1]["loss"] == 40.0


def test_reopening_a_finished_file_changes_nothing(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        for step in (1, 0, 2):
            writer.write(step, {"loss": float(step)})
    before = (tmp_path / "metrics.jsonl").read_bytes()
    MetricsWriter(tmp_path, resume_step=2, tensorboard=False).close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1, 2]


def test_only_the_first_process_writes_and_all_know_the_past_lines(tmp_path, monkeypatch):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        for step in range(1, 4):
            writer.write(step, {"loss": float(step)})
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with monkeypatch.context() as second:
        second.setattr("jax.process_index", lambda: 1)
        with MetricsWriter(tmp_path, resume_step=2) as writer:
            writer.write(3, {"loss": 30.0})
    assert [line["step"] for line in writer.past] == [1, 2]
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_an_incomplete_last_line_is_dropped(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(1, {"loss": 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    with MetricsWriter(tmp_path, resume_step=2, tensorboard=False) as writer:
        writer.write(2, {"loss": 2.0})
    assert [line["loss"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1.0, 2.0]


def test_values_that_are_not_finite_become_null_and_text_is_kept(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(1, {"loss": float("nan"), "why": "collapse", "count": np.int64(3)})
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"step": 1, "loss": None, "why": "collapse", "count": 3}
    ]


def test_evaluations_after_the_checkpoint_can_be_written_again_in_order(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"loss": 1.0})
        saved = writer.lines
        writer.write(0, {"eval/em": 0.0})
        writer.write(1, {"eval/em": 0.5})
        writer.write(2, {"loss": 2.0})
    before = (tmp_path / "metrics.jsonl").read_bytes()
    for _ in range(2):  # a process that wrote nothing changes nothing for the next
        with MetricsWriter(tmp_path, 1, saved) as writer:
            assert writer.past == [{"step": 1, "loss": 1.0}] and writer.lines == saved == 1
            assert writer.removed == [{"step": 0, "eval/em": 0.0}, {"step": 1, "eval/em": 0.5}]
            (tmp_path / "metrics.jsonl").write_bytes(before)
    with MetricsWriter(tmp_path, 1, saved) as writer:
        for line in writer.removed:
            writer.write(line["step"], {"eval/em": line["eval/em"]})
        writer.write(2, {"loss": 2.0})
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert sorted(scalars_of(tmp_path)) == [
        *[("eval/em", 0, 0.0), ("eval/em", 1, 0.5)],
        *[("loss", 1, 1.0), ("loss", 2, 2.0)],
    ]


@pytest.mark.parametrize(("left", "lines"), [(0, 3), (1, 3), (0, None)])
def test_lost_lines_are_reported_in_the_log(tmp_path, caplog, left, lines):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        for step in (1, 2, 3):
            writer.write(step, {"loss": 1.0})
    file = tmp_path / "metrics.jsonl"
    whole = file.read_text().splitlines(keepends=True)
    with caplog.at_level(logging.WARNING):
        MetricsWriter(tmp_path, 3, lines, tensorboard=False).close()
        assert not caplog.records
        file.write_text("".join(whole[:left]))
        MetricsWriter(tmp_path, 3, lines, tensorboard=False).close()
    (record,) = caplog.records
    number = f"only {left}" if left else "none"
    of = f"the {lines} lines" if lines else "the lines"
    assert f"{file} holds {number} of {of} that the run had written" in record.getMessage()
    assert "checkpoint of step 3" in record.getMessage()
    caplog.clear()
    file.unlink()
    MetricsWriter(tmp_path, tensorboard=False).close()  # without a checkpoint no lines are missing
    assert not caplog.records


def test_duplicate_lines_do_not_displace_others(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        for step in (1, 2, 3):
            writer.write(step, {"loss": 1.0})
    file = tmp_path / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*lines[:1], *lines[:1], *lines]))
    MetricsWriter(tmp_path, 3, 3, tensorboard=False).close()
    assert file.read_text() == "".join(lines)


def test_lines_without_a_checkpoint_are_reported_before_they_are_dropped(tmp_path, caplog):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    with caplog.at_level(logging.WARNING):
        MetricsWriter(tmp_path, 0, 0, tensorboard=False).close()
    assert "metrics.jsonl holds 2 lines of a run without a checkpoint" in caplog.text


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"step": 2, "eval/em": "a"}', "eval/em='a' must be a number or null"),
        (b'{"step": 2, "reward/total": [1]}', "must be a number or null"),
        (b'{"step": 2, "why": "\xff"}', "'utf-8' codec can't decode byte 0xff"),
        (b'{"loss": 1.0}', "the field step is missing"),
        (b"5", "5 is not a JSON object"),
        (b'{"step": "2"}', "step='2' must be a number"),
        (b'{"step": null}', "step=None must be a number"),
        (b'{"step": true}', "step=True must be a number"),
        (b'{"step": NaN}', "step=nan must be a number"),
        (b'{"step": 2, "lo', "Expecting|Unterminated"),
        (b"[" * 100_000, "recursion"),
    ],
)
def test_the_error_for_a_damaged_line_names_it_and_nothing_is_written(tmp_path, line, words):
    file = tmp_path / "metrics.jsonl"
    content = b'{"step": 1}\n' + line + b'\n{"step": 3}\n'
    file.write_bytes(content)
    opened = (
        lambda: read_metrics(file),
        lambda: refuse_damaged_metrics(tmp_path),
        lambda: MetricsWriter(tmp_path),
    )
    for use in opened:
        with pytest.raises(
            UserError, match=rf"^{re.escape(str(file))}, line 2: .*({words}).*; remove that line"
        ):
            use()
    assert file.read_bytes() == content and list(tmp_path.iterdir()) == [file]


def test_a_complete_last_line_without_a_newline_counts(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n\n{"step": 2}')
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


def test_each_scalar_is_in_the_tensorboard_file_when_write_returns(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"loss": 1.0, "why": "text", "none": np.float32("nan")})
        assert scalars_of(tmp_path) == [("loss", 1, 1.0)]
        writer.write(2, {"loss": 2.0})
    with MetricsWriter(tmp_path, resume_step=1) as writer:
        writer.write(2, {"loss": 20.0})
    assert scalars_of(tmp_path) == [("loss", 1, 1.0), ("loss", 2, 20.0)]
