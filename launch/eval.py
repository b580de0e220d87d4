"""Evaluates a method on a dataset: `python launch/eval.py --config=configs/eval.py:method=...,dataset=...,policy=...`.

The same command continues an evaluation that was stopped or killed, after its last answered question.
"""

from collections.abc import Sequence

from rrl.runs import launcher

_CONFIG, _WORKDIR = launcher.define_run_flags()


def main(_: Sequence[str]) -> None:
    """Answer the questions, score the answers and print the metrics."""
    from rrl.eval.evaluate import run

    run(_CONFIG.value, _WORKDIR.value or f"runs/{_CONFIG.value.name}")


if __name__ == "__main__":
    launcher.run(main)
