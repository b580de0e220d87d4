"""How a launcher starts: flags and a config file in, and for wrong input one clear line and exit code 2."""

import ast
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
from rrl.stopping import RunStopped, ServiceUnavailable

EXIT_USER_ERROR = 2
"""Exit code for what a person must change: wrong input, or a workdir that cannot be written. Starting again does not help."""
EXIT_COLLAPSED = 3
"""Exit code of a run that its guard ended."""
EXIT_TRY_AGAIN = 42
"""Exit code of a run that ended after saving because a service (a judge, a reader) gave no answer; the same command continues
it. xpk restarts a job on 42 and on 127 to 255; Slurm requeues on the codes that its RequeueExit lists."""
EXIT_STOPPED = 143
"""Exit code of a run that SIGTERM or Ctrl-C stopped after saving; the same command continues it."""


def run(main: Callable[[Sequence[str]], None], callbacks: bool = True) -> None:
    """Parses flags and runs `main`; wrong input (flags, config arguments, fields, files) ends with exit code
    `EXIT_USER_ERROR`, and so do a failed save and a search that cannot be done; a service that is away with `EXIT_TRY_AGAIN`.

    absl's own handling would print the whole usage text and exit with code 1. `callbacks`: see `prepare_host`, which
    must come before the flags, since config files import jax.
    """
    use_huge_pages()
    prepare_host(callbacks)
    sys.argv[1:] = rename_overrides(sys.argv[1:])
    # A config of another folder may import `configs`.
    sys.path.append(str(pathlib.Path(sys.argv[0]).resolve().parent.parent))

    def parse(argv: Sequence[str]) -> list[str]:
        try:
            return _parse_flags(argv, flags.FLAGS)
        except UserError as error:
            _fail(error)
        except SystemExit:
            # absl's flags of help exit with 1.
            if any(re.fullmatch(r"--?(help\w*|\?)", arg) for arg in argv):
                sys.exit(0)
            raise

    def guarded(argv: Sequence[str]) -> None:
        absl_logging.set_verbosity(absl_logging.WARNING)  # checkpointing tells every file it touches at INFO
        logging.getLogger("rrl").setLevel(logging.INFO)
        _quiet_failed_saves()
        try:
            main(argv)
        except SaveError as error:
            _exit_at_once(error)
        except (UserError, SearchFailed) as error:
            _fail(error)
        except ServiceUnavailable as error:
            _fail(f"{error}; the same command continues", EXIT_TRY_AGAIN)
        except RunStopped as error:
            _fail(error, EXIT_STOPPED)
        except OSError as error:
            if error.errno in DISK_FULL:
                if error.filename:
                    _exit_at_once(save_error(pathlib.Path(error.filename), error))
                full = f"the disk, its inodes or the quota are full ({error}). Free space"
                _exit_at_once(SaveError(f"{full}, then give the same command again"))
            # ml_collections reports a config file that it could not read at the first use of the config only.
            if str(error).startswith("Configuration is not available"):
                _fail(" ".join(str(error.__cause__ or error).split()))
            if not error.filename:
                raise
            _fail(f"{error.filename}: {error.strerror}. Make it what the command needs, or give another path")

    app.run(guarded, flags_parser=parse)


def exit_after_runs(failed: Mapping[str, str], stopped: bool, again: bool = False) -> None:
    """Names what failed of several runs, with its reason, and exits where one did or all were stopped. `again`: starting again
    continues what failed."""
    for name, reason in failed.items():
        print(f"error: {name}: {reason}", file=sys.stderr)
    if stopped or failed:
        sys.exit(EXIT_STOPPED if stopped else EXIT_TRY_AGAIN if again else 1)


def load_config(config: str, overrides: Sequence[str]) -> Any:
    """The config that `--config=CONFIG --config.FIELD=VALUE ...` gives a launcher; each override is a FIELD=VALUE.

    Raises UserError as a launcher would end with it.
    """
    values = flags.FlagValues()
    given = rename_overrides([f"--config.{override}" for override in overrides])
    argv = ["rrl", f"--config={config}", *given]
    holder = config_flags.DEFINE_config_file("config", None, "", values, lock_config=True, sys_argv=argv)
    _parse_flags(argv, values)
    return holder.value


def _parse_flags(argv: Sequence[str], values: flags.FlagValues) -> list[str]:
    """What is left of the arguments when the flags are taken out; UserError says what is wrong with them."""
    argv = _with_shipped_config(argv)
    try:
        return values(argv)
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(cause := _cause(error), UserError):  # of the config file, whatever overrides there are
            raise UserError(str(cause)) from error
        known = {
            AttributeError: _unknown_field,
            KeyError: _unknown_field,
            flags.IllegalFlagValueError: _wrong_value,
        }
        said = next((say(argv, values) for kind, say in known.items() if isinstance(error, kind)), "")
        raise UserError(said or str(cause)) from error


def _with_shipped_config(argv: Sequence[str]) -> list[str]:
    """The arguments, with the checkout's file for a config `configs/...` that is not under the current folder."""
    found = list(argv)
    for at, arg in enumerate(argv):
        flag, equals, value = arg.partition("=")
        if at and re.fullmatch("--?config", argv[at - 1]):
            flag, equals, value = "", "", arg
        elif not (equals and re.fullmatch("--?config", flag)):
            continue
        file, colon, rest = value.partition(":")
        found[at] = f"{flag}{equals}{shipped(file) if file else ''}{colon}{rest}"
    return found


def default_workdir(config: Any) -> str:
    """Folder of a run that was given none, from its config flag: configs/miniwiki_pretrain.py has runs/pretrain.

    With arguments it has one of its own, so that a smoke run does not stand in the way of the main one.
    """
    file, _, arg = config_flags.get_config_filename(config).partition(":")
    return f"runs/{run_name(pathlib.Path(file).stem.removeprefix('miniwiki_'), arg)}"


def _cause(error: BaseException) -> BaseException:
    """The innermost UserError behind an error, which ml_collections wraps together with its traceback."""
    found, inner = error, error.__cause__ or error.__context__
    while inner is not None:
        found = inner if isinstance(inner, UserError) else found
        inner = inner.__cause__ or inner.__context__
    return found


def _overrides(argv: Sequence[str], values: flags.FlagValues) -> tuple[Any, dict[str, str]]:
    """The config as its file makes it (None: no config), and what `--config.a.b=1` would set in it, by name."""
    matches = [re.match(r"--?(?:no)?(config\.[^=]+)(?:=(.*))?", arg, re.DOTALL) for arg in argv]
    given = {match[1]: match[2] or "" for match in matches if match}
    at = next((place for place, arg in enumerate(argv) if re.match(r"--?config(=|$)", arg)), None)
    if not given or at is None:
        return None, {}
    return values["config"].parser.parse(argv[at].partition("=")[2] or argv[at + 1]), given


def _unknown_field(argv: Sequence[str], values: flags.FlagValues) -> str:
    """What is wrong with the first override of a field that the config does not have; or ""."""
    config, given = _overrides(argv, values)
    for name in given:
        section, path = config, "config"
        for field in name.split(".")[1:]:
            fields = sorted(section) if hasattr(section, "keys") else []
            if field not in fields:
                return (
                    f"--{name}: {path} has no field {field!r}; its fields are {', '.join(fields) or 'none'}"
                )
            section, path = section[field], f"{path}.{field}"
    return ""


def _wrong_value(argv: Sequence[str], values: flags.FlagValues) -> str:
    """What is wrong with the first override whose value is not of its field's type; or ""."""
    config, given = _overrides(argv, values)
    for name, value in given.items():
        section = config
        *path, field = name.split(".")[1:]
        for part in path:
            section = section[part]
        kind = section.get_type(field)
        if kind in _PARSERS and not _PARSERS[kind][0](value):
            return f"--{name}={value!r} must be {_PARSERS[kind][1]}; the config has {section[field]!r}"
    return ""


def _parses_as(kind: Callable[[str], Any]) -> Callable[[str], bool]:
    def reads(text: str) -> bool:
        try:
            kind(text)
        except (ValueError, SyntaxError):
            return False
        return True

    return reads


_PARSERS: dict[type, tuple[Callable[[str], bool], str]] = {
    bool: (lambda text: text.lower() in ("true", "t", "1", "false", "f", "0"), "true or false"),
    int: (_parses_as(int), "a whole number"),
    float: (_parses_as(float), "a number"),
    tuple: (_parses_as(ast.literal_eval), "a tuple in Python's form, texts in it in quotes"),
}
"""Field types of which not every text is a value: what reads one, and what is allowed, in words."""


def _fail(error: object, code: int = EXIT_USER_ERROR) -> NoReturn:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(code)


def _quiet_failed_saves() -> None:
    """Of a save that fails in the background only the SaveError is shown: Orbax's threads log the traceback of each array, and
    TensorStore's report to event loops that Orbax has closed."""
    logging.getLogger("absl").addFilter(
        lambda record: not (record.exc_info and f"{os.sep}orbax{os.sep}" in record.pathname)
    )
    report = sys.unraisablehook

    def unraisable(error: "sys.UnraisableHookArgs") -> None:
        if error.object is not None or str(error.exc_value) != "Event loop is closed":
            report(error)

    sys.unraisablehook = unraisable


def _exit_at_once(error: SaveError) -> NoReturn:
    """Ends without the interpreter's shutdown, which would wait for threads that wait for the disk, and print a traceback for
    each file that it cannot flush."""
    print(f"error: {error}", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the log may lie on the same disk
            stream.flush()
    os._exit(EXIT_USER_ERROR)
