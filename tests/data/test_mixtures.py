"""Tests of the papers' training sets: published sizes, draws that depend on the seed alone, disjoint splits."""

import pytest

from rrl.data.mixtures import PAPERS, MixturePart, draw_part, paper_parts
from rrl.data.questions import Question
from rrl.errors import UserError


def made(count: int) -> list[Question]:
    return [Question(str(at), f"{at}?", ("x",)) for at in range(count)]


def places(questions: list[Question]) -> list[int]:
    return [int(question.id) for question in questions]


def test_sizes_are_those_of_the_papers() -> None:
    """R2AG, B.2: 4,674 and 300; TIRESRAG-R1, appendix B: 8,148; R3-RAG, 4.1: 8,192; R-Search, 4.3: 2Wiki alone."""
    assert sum(part.train for part in paper_parts("r2ag").values()) == 4674
    assert sum(part.validation for part in paper_parts("r2ag").values()) == 300
    assert sum(part.train for part in paper_parts("tiresrag").values()) == 8148
    assert paper_parts("r3rag") == {"hotpotqa": MixturePart(8192, skip_first=30_000)}
    assert paper_parts("rsearch") == {"2wiki": MixturePart()}
    with pytest.raises(UserError, match=r"paper='x' is unknown; choose one of rsearch, r3rag"):
        paper_parts("x")


def test_a_draw_depends_on_the_seed_and_validation_is_disjoint_from_training() -> None:
    questions = made(60)
    first = draw_part(questions, MixturePart(20, 10), seed=1)
    assert (
        first
        == draw_part(questions, MixturePart(20, 10), seed=1)
        != draw_part(questions, MixturePart(20, 10), seed=2)
    )
    train, validation = places(first["train"]), places(first["validation"])
    assert (len(train), len(validation)) == (20, 10) and not set(train) & set(validation)
    assert train == sorted(train) != list(range(20))
    assert draw_part(questions, MixturePart()) == {"train": questions}


def test_r3rag_does_not_train_on_questions_of_its_cold_start() -> None:
    """Appendix C: the first 30,000 questions of HotpotQA, then 8,192 of the rest, here at a scale of 0.01."""
    questions = made(905)
    cold, learned = (
        draw_part(questions, PAPERS[paper]["hotpotqa"], seed=3, scale=0.01)["train"]
        for paper in ("r3rag_cold_start", "r3rag")
    )
    assert places(cold) == list(range(300))
    assert len(learned) == 82 and min(places(learned)) >= 300


def test_scale_keeps_proportions() -> None:
    taken = {name: draw_part(made(200), part, scale=0.05) for name, part in PAPERS["r2ag"].items()}
    assert [len(some["train"]) for some in taken.values()] == [25, 150, 59]
    assert [len(some.get("validation", ())) for some in taken.values()] == [0, 8, 8]
    assert len(draw_part(made(10), MixturePart(), scale=0.5)["train"]) == 5


@pytest.mark.parametrize(
    ("count", "part", "scale", "words"),
    [
        (5, MixturePart(6), 1.0, r"nq: 5 questions, but 6 to train on are required"),
        (9, MixturePart(6, 4), 1.0, r"9 questions, but 6 to train on and 4 for validation are"),
        (9, MixturePart(6, skip_first=4), 1.0, r"5 questions after the first 4, but 6"),
        (3, MixturePart(6, skip_first=4), 1.0, r"0 questions after the first 4"),
        (9, MixturePart(6), 0.01, r"but 0 to train on are required \(scale=0.01\)"),
        (99, MixturePart(60, 4), 0.1, r"and 0 for validation"),
        (9, MixturePart(6), 0.0, r"scale=0.0 must be above 0 and at most 1"),
        (9, MixturePart(6), 1.5, r"scale=1.5 must be above 0 and at most 1"),
    ],
)
def test_parts_larger_than_the_file_and_scales_out_of_range_are_refused(
    count: int, part: MixturePart, scale: float, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        draw_part(made(count), part, scale=scale, name="nq")
