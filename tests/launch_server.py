"""Runs launchers in forks of one process, so that many tests import jax, transformers and rrl once.

The process reads one request per line of its input, `{"argv": [...], "cwd": ..., "stdout": FILE, "stderr": FILE}`, and prints the
exit code. Start it with `tests.launching.launch`.
"""

import json
import os
import runpy
import sys
import traceback
from typing import Any, NoReturn

import rrl.eval.evaluate
import rrl.sft.stages
import rrl.train.experiment  # noqa: F401  these three import almost all of rrl, and start no JAX backend


def serve() -> None:
    """Answer requests until the input ends."""
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            run(request)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def run(request: dict[str, Any]) -> NoReturn:
    """Run a launcher as `python ARGV` would, and end this process with its exit code."""
    sys.stdin.close()
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(request[name], os.O_WRONLY), descriptor)
    os.chdir(request["cwd"])
    sys.argv, sys.path[0] = request["argv"], os.path.dirname(os.path.abspath(request["argv"][0]))
    code = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):  # Python prints it and exits with 1
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    serve()
