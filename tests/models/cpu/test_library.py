"""Compiling the CPU kernels is cached and safe."""

import hashlib
import logging
import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from rrl.models.cpu import library as kernel


def test_the_kernels_are_compiled_once(compiled, tmp_path, monkeypatch):
    first, run = kernel._compiled_library(tmp_path), subprocess.run

    def only_version(command, **how):
        assert command[1:] == ["--version"]
        return run(command, **how)

    monkeypatch.setattr(subprocess, "run", only_version)
    assert kernel._compiled_library(tmp_path) == first and {*tmp_path.iterdir()} == {
        first,
        kernel._checksum_file(first),
    }


@pytest.mark.slow
def test_a_compiled_library_needs_no_compiler(compiled, tmp_path, monkeypatch, caplog):
    first = kernel._compiled_library(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert (
        kernel._compiled_library(tmp_path) == first and "CXX=no-such-compiler: no such program" in caplog.text
    )
    monkeypatch.setattr(kernel, "FLAGS", (*kernel.FLAGS, "-g"))
    with pytest.raises(FileNotFoundError, match="There is no"):
        kernel._compiled_library(tmp_path)


def test_a_missing_compiler_is_warned_about(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with caplog.at_level(logging.WARNING):
        assert not kernel.library.__wrapped__()
    assert "There is no C++ compiler." in caplog.text and "CXX" in caplog.text


def test_an_unparsable_cxx_is_warned_about(monkeypatch, caplog):
    monkeypatch.setenv("CXX", "'g++")
    with caplog.at_level(logging.WARNING):
        assert not kernel.library.__wrapped__()
    assert "No closing quotation" in caplog.text


def test_the_error_of_a_failing_compiler_is_in_the_warning(monkeypatch, tmp_path, caplog):
    broken = tmp_path / "c++"
    broken.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo broken && exit 0\necho out of order >&2\nexit 1\n'
    )
    broken.chmod(broken.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with caplog.at_level(logging.WARNING):
        assert not kernel.library.__wrapped__()
    assert "out of order" in caplog.text


@pytest.fixture
def harmless(compiled, tmp_path, monkeypatch):
    """Replaces the kernels' source by a trivial function, and the compiled library in the cache by a different one."""
    source, planted = tmp_path / "source.cc", tmp_path / "planted.cc"
    source.write_text('extern "C" int ours() { return 1; }')
    planted.write_text('extern "C" int theirs() { return 1; }')
    monkeypatch.setattr(kernel, "SOURCE", source)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path.resolve() / "cache" / "rrl" / "kernels"
    folder.mkdir(parents=True, mode=0o700)
    library = kernel._compiled_library(folder)
    compiler = next(name for name in ("c++", "g++", "clang++") if shutil.which(name))
    subprocess.run([compiler, "-shared", "-fPIC", str(planted), "-o", str(library)], check=True)
    library.chmod(0o755)
    kernel._checksum_file(library).write_text(hashlib.sha256(library.read_bytes()).hexdigest())
    return library


def test_a_library_that_only_this_user_can_write_is_loaded(harmless, caplog):
    assert hasattr(kernel._load_library(), "theirs") and not caplog.messages


@pytest.mark.parametrize("size", [0, 2000])
def test_a_truncated_library_is_compiled_again(harmless, caplog, size):
    os.truncate(harmless, size)
    assert (
        hasattr(kernel._load_library(), "ours")
        and f"{harmless} differs from what was compiled" in caplog.text
    )
    caplog.clear()
    assert hasattr(kernel._load_library(), "ours") and not caplog.messages


def test_with_a_cache_that_others_may_write_the_library_is_compiled_elsewhere(harmless, caplog):
    harmless.parent.chmod(0o777)
    before, made = harmless.read_bytes(), kernel._load_library()
    assert hasattr(made, "ours") and not hasattr(made, "theirs")
    assert f"{harmless.parent} may be written to by other users" in caplog.text
    assert harmless.read_bytes() == before and not Path(made._name).exists()


def test_a_library_that_others_may_write_is_compiled_again(harmless, caplog):
    harmless.chmod(0o757)
    assert (
        hasattr(kernel._load_library(), "ours")
        and f"{harmless} may be written to by other users" in caplog.text
    )
    assert stat.S_IMODE(harmless.stat().st_mode) == 0o700
    caplog.clear()
    assert hasattr(kernel._load_library(), "ours") and not caplog.messages


def test_without_a_compiler_a_library_that_others_may_write_is_not_loaded(harmless, monkeypatch):
    monkeypatch.setenv("PATH", str(harmless.parent))
    monkeypatch.delenv("CXX", raising=False)
    assert kernel._compiled_library(harmless.parent) == harmless
    harmless.chmod(0o757)
    with pytest.raises(FileNotFoundError, match="There is no"):
        kernel._compiled_library(harmless.parent)
