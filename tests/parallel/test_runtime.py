"""The host is set up before jax starts, or says that it is too late."""

import os
import subprocess
import sys

import jax
import pytest

from rrl.parallel.runtime import enable_compilation_cache, prepare_host


def test_prepare_host_comes_without_jax_and_sets_the_pool():
    program = (
        "import os, sys; from rrl.parallel.runtime import prepare_host; prepare_host(); "
        "print(os.environ['NPROC'], 'jax' in sys.modules)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "NPROC"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    run = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == ["32", "False"]


def test_prepare_host_says_when_jax_was_first(monkeypatch):
    monkeypatch.setenv("NPROC", "2")
    with pytest.warns(UserWarning, match="NPROC=32"):
        prepare_host()


def test_prepare_host_is_quiet_where_all_is_set(monkeypatch, recwarn):
    monkeypatch.setenv("NPROC", "32")
    prepare_host()
    assert not recwarn


def test_compilation_cache_goes_to_the_users_cache_folder(monkeypatch, tmp_path):
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    try:
        assert enable_compilation_cache() == tmp_path / "rrl" / "jax"
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "rrl" / "jax")
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
