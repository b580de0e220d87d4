"""The host is set up before jax starts, or a warning says that it is too late."""

import os
import pathlib
import subprocess
import sys

import jax
import pytest

from rrl.parallel.runtime import enable_compilation_cache, prepare_host, use_huge_pages


def test_prepare_host_sets_the_pool_size_without_importing_jax():
    program = (
        "import os, sys; from rrl.parallel.runtime import prepare_host; prepare_host(); "
        "print(os.environ['NPROC'], 'jax' in sys.modules)"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("NPROC", "XLA_FLAGS")}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    run = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == [str(max(4, (os.cpu_count() or 1) + 2)), "False"]


def test_prepare_host_warns_if_jax_was_imported_before(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setenv("NPROC", "2")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=3")
    with pytest.warns(UserWarning, match="NPROC=12"):
        prepare_host()


def test_the_pool_is_never_smaller_than_the_number_of_cores(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setenv("NPROC", "16")
    with pytest.warns(UserWarning, match="NPROC=66"):
        prepare_host()


def test_prepare_host_does_not_warn_if_nproc_is_set(monkeypatch, recwarn):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setenv("NPROC", "32")
    prepare_host()
    assert not recwarn


def test_without_callbacks_the_pool_has_one_thread_per_core_unless_the_user_set_nproc(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS")
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    for given, left in (("4", None), ("16", "16")):
        monkeypatch.setenv("NPROC", given)
        prepare_host(callbacks=False)
        assert os.environ.get("NPROC") == left


def test_huge_pages_restart_the_process_once(monkeypatch):
    started = []
    monkeypatch.setattr(os, "execv", lambda *call: started.append(call))
    monkeypatch.setattr(pathlib.Path, "read_text", lambda _: "always [madvise] never")
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    use_huge_pages()
    assert os.environ["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
    use_huge_pages()
    assert started == [(sys.executable, [sys.executable, *sys.orig_argv[1:]])]
    monkeypatch.delenv("GLIBC_TUNABLES")
    monkeypatch.setattr(pathlib.Path, "read_text", lambda _: "[always] madvise never")
    use_huge_pages()
    assert len(started) == 1


def test_the_compilation_cache_is_in_the_users_cache_folder(monkeypatch, tmp_path):
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    try:
        assert enable_compilation_cache() == tmp_path / "rrl" / "jax"
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "rrl" / "jax")
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_a_compilation_cache_that_others_may_write_to_is_not_used(monkeypatch, tmp_path, caplog):
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shared = tmp_path / "rrl" / "jax"
    shared.mkdir(parents=True)
    shared.chmod(0o777)
    assert enable_compilation_cache() is enable_compilation_cache(shared) is None
    assert jax.config.jax_compilation_cache_dir == before
    assert f"{shared} may be written to by other users (its mode is 777)" in caplog.text
