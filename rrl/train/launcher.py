"""How a launcher starts: flags and a config file in, and for wrong input one clear line and exit code 2."""

import sys
from collections.abc import Callable, Sequence

from absl import app, flags, logging

from rrl.errors import UserError


def run(main: Callable[[Sequence[str]], None]) -> None:
    """Parses flags and runs `main`; wrong input (flags, config arguments, fields, files) ends with exit code 2.

    absl's own handling would print the whole usage text and exit with code 1.
    """

    def parse(argv: Sequence[str]) -> list[str]:
        try:
            return flags.FLAGS(argv)
        except UserError as error:
            _fail(error)
        except (flags.Error, AttributeError, KeyError, TypeError, ValueError) as error:
            _fail(error)
        except FileNotFoundError as error:
            _fail(f"no such file: {error.filename}")

    def guarded(argv: Sequence[str]) -> None:
        logging.set_verbosity(logging.WARNING)  # checkpointing tells every file it touches at INFO
        try:
            main(argv)
        except UserError as error:
            _fail(error)

    app.run(guarded, flags_parser=parse)


def _fail(error: object) -> None:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
