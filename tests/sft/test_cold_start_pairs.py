"""Which trajectories of a question become pairs, and the report about the others."""

from rrl.sft.cold_start_pairs import select_pairs


def record(number, *outputs, fault="", temperature=0.1):
    pairs = [] if fault else [[f"in {i}", text] for i, text in enumerate(outputs)]
    fields = {"temperature": temperature, "fault": fault, "unread": 0}
    return {"number": number, "id": f"q{number}", "pairs": pairs, **fields}


def test_the_first_distinct_trajectories_of_a_question_are_selected():
    records = [
        record(0, "a", "b"),
        record(0, "a ", " b"),
        record(0, "c"),
        record(1, fault="incorrect"),
        record(1, "a", "b", temperature=1.0),
    ]
    pairs, report = select_pairs(records, 1, 2)
    assert [(p["id"], p["step"], p["output"]) for p in pairs] == [
        ("q0", 1, "a"),
        ("q0", 2, "b"),
        ("q1", 1, "a"),
        ("q1", 2, "b"),
    ]
    assert report.fell == {"duplicate": 1, "more than sampling.keep of its question": 1, "incorrect": 1}
    assert (report.kept, report.answered, report.pairs) == (2, 2, 4)
    _, both = select_pairs(records, 0, 2)
    assert both.kept == 3 and both.fell == {"duplicate": 1, "incorrect": 1}
