"""Writes a report of finished runs: report.md, report.csv and report.html."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from rrl.errors import UserError
from rrl.eval.comparison import as_csv, comparison_rows
from rrl.eval.comparison_tables import as_markdown
from rrl.eval.evaluation_run import EvaluationRun, load_runs
from rrl.files import atomic_stream, saving
from rrl.report.curves import plot_spread
from rrl.studies.report_html import QUESTIONS_SHOWN, report_page


def write_run_report(
    folders: Sequence[str | Path],
    out: str | Path,
    *,
    title: str = "Evaluations",
    level: float = 0.95,
    seed: int = 0,
    shown: int = QUESTIONS_SHOWN,
) -> str:
    """Write the three files into `out` and return the Markdown.

    A folder with metrics.json is an evaluation. A folder with metrics.jsonl is a training run, whose
    curves are drawn. Curves are also drawn for an evaluated policy that lies in the workdir of its
    training run.

    Args:
      folders: evaluations and training runs. The first evaluation is the one that the others are
        compared with.
      out: folder for the report.
      title: heading of the page.
      level: level of the confidence intervals, such as 0.95.
      seed: seed of the bootstrap.
      shown: number of questions whose trajectories are shown side by side.

    Raises:
      UserError: a folder is neither an evaluation nor a training run, an evaluation is unfinished, or no
        folder is an evaluation. Nothing is written then.
    """
    training_folders = [Path(folder) for folder in folders if _is_training(Path(folder))]
    runs = load_runs([folder for folder in folders if Path(folder) not in training_folders])
    rows = comparison_rows(runs, level, seed)
    text = as_markdown(runs, rows)
    html = report_page(runs, rows, title=title, curves=_curves(runs, training_folders), shown=shown)
    out = Path(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"out={str(out)!r} cannot be created ({error}); give another folder") from error
    for name, content in (("report.md", text), ("report.csv", as_csv(rows)), ("report.html", html)):
        with saving(out / name), atomic_stream(out / name) as stream:
            stream.write(content.encode("utf-8", "replace"))
    return text


def _is_training(folder: Path) -> bool:
    return (folder / "metrics.jsonl").is_file() and not (folder / "metrics.json").is_file()


def _curves(runs: Sequence[EvaluationRun], training_folders: Sequence[Path]) -> bytes:
    """Return a PNG with the curves of the training runs, each drawn once; empty if there are none."""
    files = {str(folder / "metrics.jsonl"): str(folder) for folder in training_folders}
    for run in runs:
        if run.training_metrics is not None:
            files.setdefault(str(run.training_metrics), str(run.training_metrics.parent))
    if not files:
        return b""
    with tempfile.TemporaryDirectory() as folder:
        plot_spread({name: [file] for file, name in files.items()}, Path(folder, "curves.png"))
        return Path(folder, "curves.png").read_bytes()
