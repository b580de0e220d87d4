"""Runs launchers for tests: `launch("score", "--predictions=FILE")`."""

import atexit
import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[1]


def launch(name: str, *flags: object) -> subprocess.CompletedProcess[str]:
    """Run `python launch/NAME.py FLAGS` in the root of the repository, as a fork of one process that has imported rrl.

    For commands that end soon, such as those with wrong input: a process of its own imports for several seconds. The environment
    is that of the first call.
    """
    command = [f"launch/{name}.py", *map(str, flags)]
    with tempfile.NamedTemporaryFile() as stdout, tempfile.NamedTemporaryFile() as stderr:
        request = {"argv": command, "cwd": str(ROOT), "stdout": stdout.name, "stderr": stderr.name}
        server = _server()
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        texts = [pathlib.Path(file.name).read_text(encoding="utf-8") for file in (stdout, stderr)]
    return subprocess.CompletedProcess(command, code, *texts)


@functools.cache
def _server() -> subprocess.Popen[str]:
    """Start `tests/launch_server.py`. It ends with this process."""
    # With GLIBC_TUNABLES set, a launcher does not restart its process (`rrl.parallel.runtime.use_huge_pages`).
    environment = {"GLIBC_TUNABLES": ""} | os.environ | {"PYTHONPATH": str(ROOT)}
    server = subprocess.Popen(
        [sys.executable, str(ROOT / "tests/launch_server.py")],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(server.communicate)
    return server
