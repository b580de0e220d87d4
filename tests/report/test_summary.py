"""The summary of a run: gains are differences, missing metrics are dashes, columns are aligned."""

from rrl.report.summary import summary, table

BEFORE = {
    "eval/em": 0.462,
    "eval/f1": 0.5,
    "eval/searches": 1.9,
    "eval/em/one_hop": 0.6,
    "eval/f1/one_hop": 0.7,
}
AFTER = {
    "eval/em": 0.55,
    "eval/f1": 0.6,
    "eval/searches": 2.25,
    "eval/em/one_hop": 0.7,
    "eval/f1/one_hop": 0.75,
}


def test_gain_and_kinds_are_shown():
    text = summary(
        BEFORE, AFTER, facts={"steps": 80, "minutes": 6.25, "tokens/s": 5120.4}, files=["curves.png"]
    )
    lines = text.splitlines()
    assert [line.split()[:2] for line in lines if line.startswith(("one hop", "all"))] == [
        ["one", "hop"],
        ["all", "46.2"],
    ]
    assert "+8.8" in next(line for line in lines if line.startswith("all"))
    assert "steps 80   minutes 6.2   tokens/s 5,120" in text
    assert lines[-1] == "curves.png"


def test_the_interval_is_shown_for_few_questions_only():
    # Wilson's interval of 40 of 80.
    text = summary({"eval/em": 0.5}, {"eval/em": 0.5}, questions=80)
    assert "Only 80 questions. 95% interval of EM: 39.3 to 60.7 before, 39.3 to 60.7 after." in text
    assert "interval of EM: 39.3 to 60.7." in summary({}, {"eval/em": 0.5}, questions=80)
    for quiet in (
        summary(BEFORE, AFTER, questions=100),
        summary(BEFORE, AFTER),
        summary({}, {}, questions=80),
    ):
        assert "interval" not in quiet


def test_the_note_is_below_the_table():
    assert "Smoke run: few questions." in summary(BEFORE, AFTER, note="smoke run: few questions").splitlines()


def test_retrieval_has_a_separate_table_if_measured():
    assert "full recall" not in summary(BEFORE, AFTER)
    found = {"eval/full_recall": 0.5, "eval/recall": 0.75, "eval/passages": 3.25, "eval/iterations": 2.5}
    after = {name: 1.1 * value for name, value in found.items()} | {"eval/full_recall/one_hop": 0.9}
    text = summary(BEFORE | found, AFTER | after)
    answers, passages = text.split("Passages found")
    assert "+8.8" in answers
    row = passages.splitlines()[-1].split()
    assert row == ["all", "50.0", "55.0", "+5.0", "75.0", "82.5", "–", "–", "3.25", "3.58", "2.50", "2.75"]


def test_missing_metrics_are_dashes():
    line = summary({}, {"eval/em": 0.5}).splitlines()[-1]
    assert line.split() == ["all", "–", "50.0", "–", "–", "–", "–", "–"]


def test_the_reference_result_is_shown_with_its_name():
    assert "cold start on clean demonstrations: EM 46.2" in summary(
        BEFORE, AFTER, reference=("cold start on clean demonstrations", 0.462)
    )


def test_the_heading_names_the_decoding():
    assert summary(BEFORE, AFTER).startswith("Held-out questions, greedy decoding (percent)\n")
    assert summary(BEFORE, AFTER, temperature=0.1).startswith(
        "Held-out questions, temperature 0.1 (percent)\n"
    )


def test_columns_are_aligned():
    lines = table([("", "a", "bb"), ("long name", "1", "2"), ("x", "10", "200")], rule_before_last=True)
    assert len({len(line) for line in lines}) == 1
    assert lines[-1] == "x          10  200"
