"""How a launcher starts: flags and a config file in, and for wrong input one clear line and exit code 2."""

import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from absl import app, flags, logging

from rrl.errors import UserError
from rrl.parallel.runtime import prepare_host, use_huge_pages

STOPPED = 143
"""Exit code of a run that SIGTERM or Ctrl-C stopped after saving; the same command continues it."""
COLLAPSED = 3
"""Exit code of a run that its guard ended."""


def run(main: Callable[[Sequence[str]], None], callbacks: bool = True) -> None:
    """Parses flags and runs `main`; wrong input (flags, config arguments, fields, files) ends with exit code 2.

    absl's own handling would print the whole usage text and exit with code 1. `callbacks`: see `prepare_host`, which
    must come before the flags, since config files import jax.
    """
    use_huge_pages()
    prepare_host(callbacks)
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would tell that PyTorch is missing

    def parse(argv: Sequence[str]) -> list[str]:
        try:
            return flags.FLAGS(argv)
        except (flags.Error, AttributeError, KeyError, TypeError, ValueError) as error:
            _fail((isinstance(error, AttributeError | KeyError) and _unknown_field(argv)) or _cause(error))

    def guarded(argv: Sequence[str]) -> None:
        logging.set_verbosity(logging.WARNING)  # checkpointing tells every file it touches at INFO
        try:
            main(argv)
        except UserError as error:
            _fail(error)
        except OSError as error:
            # ml_collections reports a config file that it could not read at the first use of the config only.
            if not str(error).startswith("Configuration is not available"):
                raise
            _fail(" ".join(str(error.__cause__ or error).split()))

    app.run(guarded, flags_parser=parse)


def _cause(error: BaseException) -> BaseException:
    """The innermost UserError behind an error, which ml_collections wraps together with its traceback."""
    found, inner = error, error.__cause__ or error.__context__
    while inner is not None:
        found = inner if isinstance(inner, UserError) else found
        inner = inner.__cause__ or inner.__context__
    return found


def _unknown_field(argv: Sequence[str]) -> str:
    """What is wrong with the first override `--config.a.b=1` of a field that the config does not have; or ""."""
    names = [match[1] for arg in argv if (match := re.match(r"--?(?:no)?(config\.[^=]+)", arg))]
    at = next((place for place, arg in enumerate(argv) if re.match(r"--?config(=|$)", arg)), None)
    if not names or at is None:
        return ""
    config: Any = flags.FLAGS["config"].parser.parse(argv[at].partition("=")[2] or argv[at + 1])
    for name in names:
        section, path = config, "config"
        for field in name.split(".")[1:]:
            fields = sorted(section) if hasattr(section, "keys") else []
            if field not in fields:
                return (
                    f"--{name}: {path} has no field {field!r}; its fields are {', '.join(fields) or 'none'}"
                )
            section, path = section[field], f"{path}.{field}"
    return ""


def _fail(error: object) -> NoReturn:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
