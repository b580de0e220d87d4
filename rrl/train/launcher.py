"""How a launcher starts: flags and a config file in, and for wrong input one clear line and exit code 2."""

import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from absl import app, flags, logging

from rrl.errors import UserError


def run(main: Callable[[Sequence[str]], None]) -> None:
    """Parses flags and runs `main`; wrong input (flags, config arguments, fields, files) ends with exit code 2.

    absl's own handling would print the whole usage text and exit with code 1.
    """

    def parse(argv: Sequence[str]) -> list[str]:
        try:
            return flags.FLAGS(argv)
        except OSError as error:
            _fail(" ".join(str(error).split()))
        except (flags.Error, AttributeError, KeyError, TypeError, ValueError) as error:
            _fail(_cause(error))

    def guarded(argv: Sequence[str]) -> None:
        logging.set_verbosity(logging.WARNING)  # checkpointing tells every file it touches at INFO
        try:
            main(argv)
        except UserError as error:
            _fail(error)

    app.run(guarded, flags_parser=parse)


def _cause(error: BaseException) -> BaseException:
    """The UserError behind an error, which ml_collections wraps together with its traceback."""
    inner: BaseException | None = error
    while inner is not None and not isinstance(inner, UserError):
        inner = inner.__cause__ or inner.__context__
    return inner or error


def _fail(error: object) -> NoReturn:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
