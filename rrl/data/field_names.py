"""Names of the fields, or columns, of questions, passages and predictions in the files of many publishers."""

PASSAGE_ID_FIELDS = ("id", "_id", "pid", "docid", "doc_id", "passage_id", "psg_id", "docno")
"""Field names of the id of a passage. If a record has several of these fields, the first name in the tuple is used. The same
holds for the tuples below, except for `ANSWER_FIELDS`."""
QUESTION_ID_FIELDS = ("id", "_id", "question_id", "QuestionId", "query_id", "qid")
"""Field names of the id of a question."""
TEXT_FIELDS = ("text", "body", "passage", "content", "document", "paragraph_text")
"""Field names of the text of a passage. `contents` is another one: its first line is the title if the record has no title."""
QUESTION_FIELDS = ("question", "text", "query", "Question", "problem", "prompt", "input")
"""Field names of a question."""
ANSWER_FIELDS = (
    "answers",
    "golden_answers",
    "answer",
    "answer_aliases",
    "possible_answers",
    "Answer",
    "reference",
)
"""Field names of gold answers. A record may have several of them, and all are used."""
PREDICTION_NAMES = (
    "prediction",
    "predictions",
    "pred",
    "pred_ans",
    "predicted_answer",
    "output",
    "response",
    "result",
)
"""Field names of a prediction."""

CANONICAL_NAMES = {
    name.lower(): name
    for names in (
        ("title", "contents", "metadata"),
        (
            *PREDICTION_NAMES,
            *ANSWER_FIELDS,
            *QUESTION_FIELDS,
            *TEXT_FIELDS,
            *QUESTION_ID_FIELDS,
            *PASSAGE_ID_FIELDS,
        ),
    )
    for name in names
} | {"question": "question", "answer": "answer"}
"""Known column names by their lower-case form. "question" and "answer" stay lower-case, although "Question" and "Answer" are
known names too."""
