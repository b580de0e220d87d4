"""Tests of the GGUF import command: a folder and one line for a good file, one line and exit code 2 for a wrong one."""

import pathlib
import subprocess

from rrl.models.hf import load_language_model
from tests.launching import launch
from tests.models.tiny_gguf import write_gguf


def import_gguf(*flags: str) -> subprocess.CompletedProcess:
    return launch("import_gguf", *flags)


def test_a_file_becomes_a_folder_that_loads(tmp_path: pathlib.Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    done = import_gguf(f"--gguf={tmp_path / 'tiny.gguf'}", f"--out={tmp_path / 'out'}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"wrote {tmp_path / 'out'}: Qwen2ForCausalLM, ")
    load_language_model(tmp_path / "out", "policy")


def test_a_truncated_file_gives_one_line_and_exit_code_2(tmp_path: pathlib.Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "cut.gguf").write_bytes((tmp_path / "tiny.gguf").read_bytes()[:50_000])
    done = import_gguf(f"--gguf={tmp_path / 'cut.gguf'}", f"--out={tmp_path / 'out'}")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(
        f"error: {tmp_path / 'cut.gguf'} (50000 bytes) is truncated"
    )
    assert not (tmp_path / "out").exists()
