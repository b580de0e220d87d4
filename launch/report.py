"""Compares evaluations: `python launch/report.py [--out=FOLDER] RUN...`.

The other runs are compared with the first. Writes report.md, report.csv and report.html: tables with intervals and paired tests;
training curves, if a RUN is a training run or its policy lies in the workdir of one; and the trajectories of all runs side by
side.
"""

from collections.abc import Sequence

from absl import flags

from rrl.runs import launcher

_OUT = flags.DEFINE_string("out", "runs/report", "Folder for report.md, report.csv and report.html.")
_TITLE = flags.DEFINE_string("title", "Evaluations", "Title of the page.")
_SHOWN = flags.DEFINE_integer(
    "shown", 60, "Number of questions whose trajectories are shown side by side.", lower_bound=0
)
_LEVEL = flags.DEFINE_float("level", 0.95, "Level of the confidence intervals.", lower_bound=0, upper_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the bootstrap.", lower_bound=0)


def main(argv: Sequence[str]) -> None:
    """Compare the runs and write the report."""
    from rrl.studies.run_report import write_run_report

    text = write_run_report(
        argv[1:],
        _OUT.value,
        title=_TITLE.value,
        level=_LEVEL.value,
        seed=_SEED.value,
        shown=_SHOWN.value,
    )
    print(f"{text}\n{_OUT.value}/report.html")


if __name__ == "__main__":
    launcher.run(main, callbacks=False)  # no rollout, hence no host callbacks
