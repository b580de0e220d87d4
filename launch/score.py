"""Scores predictions: `python launch/score.py --predictions=FILE [--data=FILE] [--normalization=squad] [--out=FOLDER]`.

Prints a table. `--against=FILE` compares with the predictions of another run on the same questions, with paired tests.
"""

from collections.abc import Sequence
from typing import Any, Literal

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
    import dataclasses
    import pathlib

    from rrl.data.questions import load_questions
    from rrl.errors import UserError
    from rrl.eval.matching import drop_unscorable, match_predictions, questions_in_file, scorable
    from rrl.eval.predictions import Prediction, load_predictions
    from rrl.eval.result_card import differences, load_card, questions_fingerprint
    from rrl.eval.score_report import as_text, compare_scores, report, write_report
    from rrl.eval.scoring import Scores, score
    from rrl.text.normalize import rule_named

    assert _PREDICTIONS.value is not None  # a required flag
    if _TRUTH.value and not _DATA.value:
        raise UserError("--truth holds the answers of --data; give --data too")
    rule, predictions_file = rule_named(_RULE.value), _PREDICTIONS.value
    card = load_card(_CARD.value) if _CARD.value else None
    if card and card.normalization != _RULE.value:
        raise UserError(
            f"--normalization={_RULE.value}, but the card {_CARD.value} states {card.normalization}; give that, or another card"
        )
    predictions = load_predictions(predictions_file, _FIELD.value, _JUDGE.value)
    data = _DATA.value or predictions_file
    if _DATA.value:
        all_questions = load_questions(_DATA.value, truth=_TRUTH.value, unanswerable="empty")
    else:
        all_questions = questions_in_file(predictions, predictions_file)
    counted = scorable(all_questions, rule)
    questions = [question for question, is_counted in zip(all_questions, counted, strict=True) if is_counted]
    if not questions:
        raise UserError(
            f"{data}: all {len(all_questions)} questions are unanswerable; --normalization=squad2 scores unanswerable questions"
        )
    if not all(counted):
        print(f"excluded: {counted.count(False)} questions that {data} marks as unanswerable")
    if card and questions_fingerprint(questions) != card.questions_sha256:
        raise UserError(
            f"{data}: its {len(questions)} questions are not the {card.questions} of the card {_CARD.value}, or their order "
            "differs; give --data=questions.jsonl of the run"
        )

    missing: Literal["refuse", "wrong"] = "wrong" if _MISSING.value == "wrong" else "refuse"
    match_by: Literal["id", "question"] = "question" if _MATCH.value == "question" else "id"

    def scored(file: str) -> Scores:
        own_predictions = (
            predictions if file == predictions_file else load_predictions(file, _FIELD.value, _JUDGE.value)
        )
        # Questions from the predictions file already match the predictions, in their order.
        from_predictions = file == predictions_file and not _DATA.value
        if from_predictions:
            pairs: list[Prediction | None] = [
                prediction
                for prediction, is_counted in zip(own_predictions, counted, strict=True)
                if is_counted
            ]
        else:
            pairs = match_predictions(
                drop_unscorable(own_predictions, all_questions, counted),
                questions,
                file,
                data,
                missing,
                match_by,
            )
        return score(pairs, questions, rule, judged=bool(_JUDGE.value))

    scores = scored(predictions_file)
    result: dict[str, Any] = {"predictions": predictions_file, "data": data, "normalization": _RULE.value}
    result |= report(scores, seed=_SEED.value, level=_LEVEL.value)
    if _AGAINST.value:
        other = scored(_AGAINST.value)
        result |= {
            "against_file": _AGAINST.value,
            "against": compare_scores(scores, other, seed=_SEED.value, level=_LEVEL.value),
        }
        # The result card of an evaluation lies beside its scores.
        card_files = {
            file: pathlib.Path(file).parent / "card.json" for file in (predictions_file, _AGAINST.value)
        }
        # Both files are scored here with the same rule, whatever their cards state.
        cards = {
            file: dataclasses.replace(load_card(card_file), normalization=_RULE.value)
            for file, card_file in card_files.items()
            if card_file.is_file()
        }
        result["unlike"] = differences(cards)
        keys = {
            file: file_scores.gold_key_and_warning[0]
            for file, file_scores in ((predictions_file, scores), (_AGAINST.value, other))
            if file_scores.hits
        }
        if len(set(keys.values())) > 1:
            result["unlike"].append(
                f"gold passages: {'; '.join(f'{file} by {key}' for file, key in keys.items())}"
            )
    if card:
        result["card"] = dataclasses.asdict(card)
    if _OUT.value:
        write_report(_OUT.value, result, scores)
    print(as_text(result))
    for line in result.get("unlike", ()):
        print(f"not directly comparable: {line}")


if __name__ == "__main__":
    launcher.run(main, callbacks=False)
