"""Checks whether two question files share questions: `python launch/leakage.py --train=FILE --held_out=FILE [--out=FILE]`.

Exit code 0: no shared questions; 1: shared questions; 2: wrong input.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from rrl.runs import launcher

_TRAIN = flags.DEFINE_string("train", None, "Training questions, in any supported format.")
_HELD_OUT = flags.DEFINE_string("held_out", None, "Test questions, in any supported format.")
_OUT = flags.DEFINE_string(
    "out", None, "JSON lines file to write, with the ids and texts of every shared pair."
)
_SHOW = flags.DEFINE_integer("show", 5, "Number of pairs to print.", lower_bound=0)
flags.mark_flags_as_required(["train", "held_out"])


def main(_: Sequence[str]) -> None:
    """Compare the files and print the number of shared questions and some of them."""
    from rrl.data.leakage import shared_questions
    from rrl.data.questions import load_questions
    from rrl.errors import UserError
    from rrl.files import atomic_stream

    assert _TRAIN.value is not None and _HELD_OUT.value is not None  # required flags
    train, held_out = (
        load_questions(file, answers_optional=True) for file in (_TRAIN.value, _HELD_OUT.value)
    )
    leaks = shared_questions(train, held_out)
    same = sum(leak.same_answer for leak in leaks)
    print(
        f"{len(leaks)} of {len(held_out)} held-out questions are among the {len(train)} training questions, "
        f"{same} of them with the same answer"
    )
    for leak in leaks[: _SHOW.value]:
        print(f"  {leak.held_out.id} = {leak.train.id}: {leak.held_out.text}")
    if _OUT.value:
        lines = [
            json.dumps(
                {
                    "held_out": leak.held_out.id,
                    "train": leak.train.id,
                    "question": leak.held_out.text,
                    "same_answer": leak.same_answer,
                },
                ensure_ascii=False,
            )
            for leak in leaks
        ]
        try:
            with atomic_stream(Path(_OUT.value)) as stream:
                stream.write("".join(line + "\n" for line in lines).encode())
        except OSError as error:
            raise UserError(
                f"--out={_OUT.value}: cannot be written ({error}); give a file in an existing folder"
            ) from error
    sys.exit(1 if leaks else 0)


if __name__ == "__main__":
    launcher.run(main, callbacks=False)  # no rollout, hence no host callbacks
