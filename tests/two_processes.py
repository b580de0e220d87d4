"""One program run by two processes that `jax.distributed` joins, four virtual devices each."""

import json
import os
import pathlib
import socket
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]


def run_twice(*command: str, timeout: float = 600) -> list[dict]:
    """Runs `python *command PORT PROCESS` in both; returns what each printed last, as JSON.

    The program itself calls `jax.distributed.initialize` with the port and its number.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    flags = "--xla_force_host_platform_device_count=4"
    started = [
        subprocess.Popen(
            [sys.executable, *command, port, str(process)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]
    try:
        ended = [process.communicate(timeout=timeout) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], ended
    return [json.loads(out.splitlines()[-1]) for out, _ in ended]
