"""Metrics files survive resumes and kills."""

import numpy as np

from rrl.train.metrics import MetricsWriter, read_metrics


def test_a_resumed_run_drops_what_came_after_its_checkpoint(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        for step in range(1, 6):
            writer.write(step, {"loss": np.float32(step)})
    with MetricsWriter(tmp_path, resume_step=3, tensorboard=False) as writer:
        writer.write(4, {"loss": 40.0})
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4] and lines[-1]["loss"] == 40.0


def test_opening_again_changes_nothing(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        for step in (1, 0, 2):
            writer.write(step, {"loss": float(step)})
    before = (tmp_path / "metrics.jsonl").read_bytes()
    MetricsWriter(tmp_path, resume_step=2, tensorboard=False).close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1, 2]


def test_of_several_processes_the_first_writes_and_all_know_the_past(tmp_path, monkeypatch):
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


def test_a_line_cut_short_by_a_kill_is_dropped(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(1, {"loss": 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    with MetricsWriter(tmp_path, resume_step=2, tensorboard=False) as writer:
        writer.write(2, {"loss": 2.0})
    assert [line["loss"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1.0, 2.0]


def test_not_finite_is_null_and_text_stays(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(1, {"loss": float("nan"), "why": "collapse", "count": np.int64(3)})
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"step": 1, "loss": None, "why": "collapse", "count": 3}
    ]


def test_tensorboard_has_the_scalars(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"loss": 1.0})
    assert list((tmp_path / "tensorboard").glob("events*"))
