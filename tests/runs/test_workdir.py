"""A workdir belongs to one config and one process; errors about it are one line."""

import json
import os
import subprocess
import sys

import pytest

from rrl.errors import UserError
from rrl.files import SaveError
from rrl.runs.workdir import read_config, read_identity, refuse_other_config
from rrl.runs.workdir_lock import lock_workdir, refuse_occupied

HOLDER = """
import sys
from rrl.runs.workdir_lock import lock_workdir
with lock_workdir(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that has locked the workdir `tmp_path / "run"`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "run")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.wait()


def test_a_workdir_stays_locked_until_its_process_ends(tmp_path, holder):
    workdir = tmp_path / "run"
    for hold in (refuse_occupied, lambda folder: lock_workdir(folder).__enter__()):
        with pytest.raises(UserError, match=r"run: another process works there\. Wait .*another --workdir"):
            hold(workdir)
    refuse_occupied(tmp_path / "other")
    holder.kill()
    holder.wait()
    refuse_occupied(workdir)
    with lock_workdir(workdir), lock_workdir(workdir):
        pass


def test_reading_needs_no_lock(tmp_path, holder):
    (tmp_path / "run" / "config.json").write_text('{"run": {}}')
    assert read_identity(tmp_path / "run") == {}


def test_only_the_first_process_of_a_run_takes_the_lock(tmp_path, holder, monkeypatch):
    monkeypatch.setattr("jax.process_index", lambda: 1)
    with lock_workdir(tmp_path / "run"):
        refuse_occupied(tmp_path / "run")


def test_a_file_system_without_locks_is_accepted(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    with lock_workdir(tmp_path / "run"):
        pass


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1,\n "b": "\xff"}', "line 2: byte 0xff is not UTF-8"),
        (b'{"a": 1,\n "b": 2', "line 2: not valid JSON"),
        (b"", "line 1: not valid JSON"),
        (b"[1, 2]", "must hold a JSON object, not list"),
        (b"3", "must hold a JSON object, not int"),
        (b"[" * 200_000, "nested too deeply"),
    ],
)
def test_the_error_for_a_broken_config_names_file_and_line(tmp_path, content, message):
    (tmp_path / "config.json").write_bytes(content)
    for read in (read_config, lambda folder: refuse_other_config(folder, {"a": 1}), read_identity):
        with pytest.raises(UserError, match=r"config\.json.*delete the workdir") as error:
            read(tmp_path)
        assert message in str(error.value) and "\n" not in str(error.value)


def test_a_config_that_is_a_folder_or_lacks_fields_of_its_run_is_refused(tmp_path):
    (tmp_path / "config.json").mkdir()
    with pytest.raises(UserError, match=r"config\.json cannot be read \(Is a directory\)"):
        refuse_other_config(tmp_path, {"a": 1})
    (tmp_path / "config.json").rmdir()
    (tmp_path / "config.json").write_text(json.dumps({"run": {"policy": "x"}}))
    with pytest.raises(UserError, match=r"config\.json lacks reader"):
        read_identity(tmp_path, "policy", "reader")
    (tmp_path / "config.json").write_text(json.dumps({"run": 3}))
    with pytest.raises(UserError, match=r"config\.json lacks run"):
        read_identity(tmp_path)


@pytest.mark.parametrize("name", ["checkpoints", "policy", "tensorboard", "metrics.jsonl", "curves.png"])
def test_an_occupied_path_is_refused(tmp_path, name):
    if "." in name:
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_text("mine")
    with pytest.raises(UserError, match=rf"{name} is a (file|folder), but the run needs .*; move it away"):
        refuse_occupied(tmp_path)


def test_a_workdir_that_cannot_be_created_raises_a_save_error(tmp_path):
    (tmp_path / "file").write_text("mine")
    with (
        pytest.raises(SaveError, match=r"file/run could not be saved: .*file is a file"),
        lock_workdir(tmp_path / "file" / "run"),
    ):
        pass


def test_a_workdir_with_a_too_long_name_is_refused(tmp_path):
    for workdir in (tmp_path / ("é" * 128), tmp_path / ("x" * 256) / "run"):
        with pytest.raises(
            UserError, match=r"a name of 256 bytes is too long .*; choose a shorter --workdir"
        ):
            refuse_other_config(workdir, {"a": 1})


def test_a_run_from_before_a_field_was_added_continues(tmp_path):
    stored = {"run": {"model": {"hidden": 64}}, "steps": 2}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    model = {"hidden": 64, "sliding_window": None, "sliding_layers": [], "local_rope_theta": None}
    now = {"run": {"model": model | {"query_pre_attn_scalar": None}}, "steps": 2}
    refuse_other_config(tmp_path, now)
    with pytest.raises(UserError, match=r"run\.model\.hidden: 64 there, 32 now"):
        refuse_other_config(tmp_path, {"run": {"model": {"hidden": 32}}, "steps": 2})
