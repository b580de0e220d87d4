"""The start of every launcher: parse flags and config, and turn errors into one clear line and an exit code.

Read `run` first.
"""

import contextlib
import logging
import os
import pathlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from absl import app, flags
from absl import logging as absl_logging
from ml_collections import config_flags

from rrl.config.arguments import run_name
from rrl.config.renamed import rename_overrides
from rrl.errors import UserError
from rrl.files import DISK_FULL, SaveError, save_error, shipped
from rrl.parallel.runtime import prepare_host, use_huge_pages
from rrl.retrieval.retriever import SearchFailed
from rrl.runs.flag_errors import describe_flag_error, innermost_user_error
from rrl.stopping import RunStopped, ServiceUnavailable

EXIT_USER_ERROR = 2
"""Exit code for errors that the user must fix: wrong input, or a workdir that cannot be written. A restart does not help."""
EXIT_COLLAPSED = 3
"""Exit code of a training run that ended itself because it collapsed (`rrl.train.guard`)."""
EXIT_TRY_AGAIN = 42
"""Exit code of a run that saved and ended because a service (a judge, a reader) did not answer. The same command continues it.
xpk restarts a job on 42 and on 127 to 255; Slurm requeues on the codes that its RequeueExit lists."""
EXIT_STOPPED = 143
"""Exit code of a run that saved and ended because of SIGTERM or Ctrl-C. The same command continues it."""


def define_run_flags() -> tuple[flags.FlagHolder[Any], flags.FlagHolder[str | None]]:
    """Define and return the flags `--config`, which is required, and `--workdir` of a launcher whose config has a `name`."""
    flags.disclaim_key_flags()  # they belong to the launcher, whose --help shows them
    config = config_flags.DEFINE_config_file(
        "config", None, "Config file, with its arguments after a colon.", lock_config=True
    )
    workdir = flags.DEFINE_string(
        "workdir",
        None,
        "Folder of the run (default: runs/ and the config's `name`). An existing run is continued.",
    )
    flags.register_validator("workdir", lambda folder: folder != "", message="--workdir must name a folder")
    flags.mark_flags_as_required(["config"])
    return config, workdir


def run(main: Callable[[Sequence[str]], None], callbacks: bool = True) -> None:
    """Parse the flags and run `main`. Errors end the process with one line and an exit code.

    Wrong input (flags, config arguments, fields, files), a failed save and a failed search exit with `EXIT_USER_ERROR`. A
    service that does not answer exits with `EXIT_TRY_AGAIN`. (absl itself prints the whole usage text and exits with code 1.)

    Args:
        main: called with the remaining arguments.
        callbacks: whether the program has host callbacks, as every rollout with retrieval does; see `prepare_host`.
    """
    use_huge_pages()
    prepare_host(callbacks)  # before the flags are parsed, since config files import jax
    sys.argv[1:] = rename_overrides(sys.argv[1:])
    # A config in another folder may import `configs`.
    sys.path.append(str(pathlib.Path(sys.argv[0]).resolve().parent.parent))

    def parse(argv: Sequence[str]) -> list[str]:
        try:
            return _parse_flags(argv, flags.FLAGS)
        except UserError as error:
            _fail(error)
        except SystemExit:
            # absl exits with 1 after --help.
            if any(re.fullmatch(r"--?(help\w*|\?)", arg) for arg in argv):
                sys.exit(0)
            raise

    def run_main(argv: Sequence[str]) -> None:
        absl_logging.set_verbosity(absl_logging.WARNING)  # checkpointing logs every file it touches at INFO
        logging.getLogger("rrl").setLevel(logging.INFO)
        _quiet_failed_saves()
        try:
            main(argv)
        except SaveError as error:
            _exit_at_once(error)
        except (UserError, SearchFailed) as error:
            _fail(error)
        except ServiceUnavailable as error:
            _fail(f"{error}; the same command continues the run", EXIT_TRY_AGAIN)
        except RunStopped as error:
            _fail(error, EXIT_STOPPED)
        except OSError as error:
            if error.errno in DISK_FULL:
                if error.filename:
                    _exit_at_once(save_error(pathlib.Path(error.filename), error))
                full = f"the disk, its inodes or the quota are full ({error}). Free space"
                _exit_at_once(SaveError(f"{full}, then give the same command again"))
            # ml_collections reports an unreadable config file only at the first use of the config.
            if str(error).startswith("Configuration is not available"):
                _fail(" ".join(str(error.__cause__ or error).split()))
            if not error.filename:
                raise
            _fail(f"{error.filename}: {error.strerror}. Fix that path, or give another one")

    app.run(run_main, flags_parser=parse)


def exit_after_runs(failed: Mapping[str, str], stopped: bool, retryable: bool = False) -> None:
    """Print the failures of several runs and exit if there are any, or if the runs were stopped.

    Args:
        failed: name of each failed run -> the reason of its failure.
        stopped: whether a signal stopped the runs.
        retryable: whether the same command continues the failed runs; the exit code is then `EXIT_TRY_AGAIN` instead of 1.
    """
    for name, reason in failed.items():
        print(f"error: {name}: {reason}", file=sys.stderr)
    if stopped or failed:
        sys.exit(EXIT_STOPPED if stopped else EXIT_TRY_AGAIN if retryable else 1)


def load_config(config: str, overrides: Sequence[str]) -> Any:
    """Return the config that a launcher gets from `--config=CONFIG --config.FIELD=VALUE ...`.

    Args:
        config: a config file with its arguments, as after `--config=`.
        overrides: FIELD=VALUE each.

    Raises:
        UserError: wrong input, with the message that a launcher would print.
    """
    values = flags.FlagValues()
    renamed = rename_overrides([f"--config.{override}" for override in overrides])
    argv = ["rrl", f"--config={config}", *renamed]
    flag = config_flags.DEFINE_config_file("config", None, "", values, lock_config=True, sys_argv=argv)
    _parse_flags(argv, values)
    return flag.value


def _parse_flags(argv: Sequence[str], values: flags.FlagValues) -> list[str]:
    """Parse the flags and return the remaining arguments. Raises UserError that names what is wrong."""
    argv = _with_shipped_config(argv)
    try:
        return values(argv)
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError) as error:
        # The config file itself raised a UserError: its message is better than one about the overrides.
        if isinstance(cause := innermost_user_error(error), UserError):
            raise UserError(str(cause)) from error
        raise UserError(describe_flag_error(error, argv, values)) from error


def _with_shipped_config(argv: Sequence[str]) -> list[str]:
    """Return the arguments with a --config file that is missing in the current folder replaced by the one that comes with rrl."""
    replaced = list(argv)
    for index, arg in enumerate(argv):
        flag, equals, value = arg.partition("=")
        if index and re.fullmatch("--?config", argv[index - 1]):
            flag, equals, value = "", "", arg
        elif not (equals and re.fullmatch("--?config", flag)):
            continue
        file, colon, rest = value.partition(":")
        replaced[index] = f"{flag}{equals}{shipped(file) if file else ''}{colon}{rest}"
    return replaced


def default_workdir(config: Any) -> str:
    """Return the default workdir: `runs/` and the config's name without "miniwiki_", such as runs/pretrain.

    Config arguments become part of the name, because a workdir belongs to one config: a smoke run gets another workdir than the
    main run.
    """
    file, _, arg = config_flags.get_config_filename(config).partition(":")
    return f"runs/{run_name(pathlib.Path(file).stem.removeprefix('miniwiki_'), arg)}"


def _fail(error: object, code: int = EXIT_USER_ERROR) -> NoReturn:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(code)


def _quiet_failed_saves() -> None:
    """Hide the output of Orbax and TensorStore when a background save fails, so that only the SaveError is shown.

    Orbax's threads would log a traceback for each array. TensorStore's threads would report to event loops that Orbax has
    already closed.
    """
    logging.getLogger("absl").addFilter(
        lambda record: not (record.exc_info and f"{os.sep}orbax{os.sep}" in record.pathname)
    )
    default_hook = sys.unraisablehook

    def unraisable(error: "sys.UnraisableHookArgs") -> None:
        if error.object is not None or str(error.exc_value) != "Event loop is closed":
            default_hook(error)

    sys.unraisablehook = unraisable


def _exit_at_once(error: SaveError) -> NoReturn:
    """Print the error and exit without the interpreter's shutdown.

    The shutdown would wait for threads that wait for the disk, and print a traceback for each file that it cannot flush.
    """
    print(f"error: {error}", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the log may lie on the same disk
            stream.flush()
    os._exit(EXIT_USER_ERROR)
