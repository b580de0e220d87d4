"""How a launcher starts: flags and a config file in, and for wrong input one clear line and exit code 2."""

import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from absl import app, flags, logging

from rrl.errors import UserError
from rrl.parallel.runtime import use_huge_pages


def run(main: Callable[[Sequence[str]], None]) -> None:
    """Parses flags and runs `main`; wrong input (flags, config arguments, fields, files) ends with exit code 2.

    absl's own handling would print the whole usage text and exit with code 1.
    """
    use_huge_pages()

    def parse(argv: Sequence[str]) -> list[str]:
        try:
            return flags.FLAGS(argv)
        except (flags.Error, AttributeError, KeyError, TypeError, ValueError) as error:
            _fail(_cause(error))

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


def _fail(error: object) -> NoReturn:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
