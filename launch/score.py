"""Scores predictions: `python launch/score.py --predictions=FILE [--data=FILE] [--normalization=squad] [--out=FOLDER]`.

Prints a table. `--against=FILE` compares with the predictions of another run on the same questions, with paired tests.
"""

from collections.abc import Sequence

from absl import flags

from rrl.runs import launcher

_PREDICTIONS = flags.DEFINE_string("predictions", None, "File of predictions; see docs/evaluation.md.")
_DATA = flags.DEFINE_string(
    "data", None, "File of questions with gold answers; not needed if the predictions file has them."
)
_TRUTH = flags.DEFINE_string(
    "truth", None, "File with the answers of --data, if --data has none (MultiHop-RAG)."
)
_RULE = flags.DEFINE_string(
    "normalization", "squad", "How answers are normalised before they are compared; see docs/evaluation.md."
)
_FIELD = flags.DEFINE_string("field", "", "Field of the prediction in a record, such as output.pred.")
_JUDGE = flags.DEFINE_string("judge_field", "", "Field of a judge's verdict in a record, true or false.")
_MISSING = flags.DEFINE_enum(
    "missing",
    "refuse",
    ["refuse", "wrong"],
    "Whether a question without a prediction is refused or counts as wrong.",
)
_MATCH = flags.DEFINE_enum(
    "match", "id", ["id", "question"], "Whether predictions are matched to questions by id or by text."
)
_AGAINST = flags.DEFINE_string("against", None, "Predictions of another run on the same questions.")
_CARD = flags.DEFINE_string("card", None, "Result card of the run, as JSON, to store beside its metrics.")
_OUT = flags.DEFINE_string("out", None, "Folder for metrics.json and scores.jsonl.")
_LEVEL = flags.DEFINE_float("level", 0.95, "Level of the confidence intervals.", lower_bound=0, upper_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the bootstrap.", lower_bound=0)
flags.mark_flags_as_required(["predictions"])


def main(_: Sequence[str]) -> None:
    """Score the predictions, print the metrics, and write them to --out if given. Wrong input writes nothing."""
    from rrl.eval.score_files import ScoringOptions, score_files
    from rrl.eval.score_report import as_text

    assert _PREDICTIONS.value is not None  # a required flag
    options = ScoringOptions(
        normalization=_RULE.value or "",
        field=_FIELD.value or "",
        judge_field=_JUDGE.value or "",
        missing="wrong" if _MISSING.value == "wrong" else "refuse",
        match="question" if _MATCH.value == "question" else "id",
        level=_LEVEL.value,
        seed=_SEED.value,
    )
    result = score_files(
        _PREDICTIONS.value,
        data=_DATA.value,
        truth=_TRUTH.value,
        against=_AGAINST.value,
        card_file=_CARD.value,
        out=_OUT.value,
        options=options,
    )
    print(as_text(result))
    for line in result.get("unlike", ()):
        print(f"not directly comparable: {line}")


if __name__ == "__main__":
    launcher.run(main, callbacks=False)  # no rollout, hence no host callbacks
