"""R2AG, Eq. 5: what is read from an output, each term by hand, and every rule that makes the reward 0."""

import pytest

from rrl.recipes.r2ag_rewards import (
    RewardWeights,
    SteeringOutput,
    average_precision,
    expansion_rewards,
    parse_output,
)

GOLD = ("A", "B", "C", "D")
ASKS = SteeringOutput(("x",), (), has_think=True, query_tags=1)
STOPS = SteeringOutput((), (), stop=True, has_think=True, query_tags=2)


def paid(output, base=(), predicted=(), **options):
    return expansion_rewards(output, base, predicted, gold=options.pop("gold", GOLD), **options)


# -- what is read (Figure A.3, B.2) ----------------------------------------------------------------------------------


def test_queries_stand_in_boxes_after_the_thought():
    asked = "<base-Q> one </base-Q><base-Q>two</base-Q>\n<predicted-Q>three</predicted-Q>"
    text = f"<think>First <base-Q>no</base-Q> this.</think>\n{asked}"
    assert parse_output(text) == SteeringOutput(("one", "two"), ("three",), has_think=True, query_tags=2)
    more = "<think>a</think><base-Q>one</base-Q><think>b <base-Q>no</base-Q></think><base-Q>two</base-Q>"
    assert parse_output(more).base == ("one", "two")
    stray = "</think><base-Q>no</base-Q><think>a</think><base-Q>one</base-Q>"
    assert parse_output(stray) == SteeringOutput(("one",), has_think=True, query_tags=1)


def test_stop_retrieval_and_none_are_signals_and_no_queries():
    text = "<think>.</think><base-Q> Stop  retrieval. </base-Q><predicted-Q>None</predicted-Q>"
    assert parse_output(text) == SteeringOutput(stop=True, has_think=True, query_tags=2)
    both = '<think>.</think><base-Q>one</base-Q><base-Q>"stop retrieval"</base-Q><predicted-Q></predicted-Q>'
    assert parse_output(both) == SteeringOutput(("one",), stop=True, has_think=True, query_tags=2)
    curly = "<think>.</think><base-Q>“Stop retrieval”</base-Q>"
    assert parse_output(curly) == SteeringOutput(stop=True, has_think=True, query_tags=1)
    swapped = "<think>.</think><base-Q>none</base-Q><predicted-Q>Stop retrieval!</predicted-Q>"
    assert parse_output(swapped) == SteeringOutput(has_think=True, query_tags=2)


@pytest.mark.parametrize("text", ["", "no tags", "<base-Q>", "<think></think>", "<base-Q> </base-Q>"])
def test_an_output_without_a_box_asks_for_nothing(text):
    found = parse_output(text)
    assert not found.base and not found.predicted and not found.stop


def test_without_a_thought_queries_are_read_and_earn_no_format_reward():
    assert parse_output("<base-Q>one</base-Q><predicted-Q>two</predicted-Q>") == SteeringOutput(
        ("one",), ("two",)
    )


# -- Eq. 5, term by term ---------------------------------------------------------------------------------------------


def test_the_coefficients_are_those_of_the_paper():
    # SPEC.md 4: alpha 0.2, beta 0.3, gamma 0.2, l 1.25, 0.01 each, t 4 and 2
    w = RewardWeights()
    assert (w.multi_hit, w.joint_hit, w.precision, w.predicted, w.format) == (0.2, 0.3, 0.2, 1.25, 0.01)
    assert (w.top_base, w.top_predicted) == (4, 2)


def test_new_gold_documents_count_and_predicted_ones_more():
    found = paid(ASKS, ["A", "noise", "B"], ["C", "noise"], known=["B"])
    assert found["multi_hit"] == 1 + 1.25  # A; C by a prediction; B was there
    assert paid(ASKS, ["a "], gold=["A"])["multi_hit"] == 1  # titles, whatever their case and space


def test_a_gold_document_hit_twice_counts_once():
    # SPEC.md 6: "in R_MH and in AP"
    twice = paid(ASKS, ["A", "A"], ["A"])
    assert twice["multi_hit"] == 1
    assert twice["precision"] == pytest.approx(1 / 4)
    # SPEC.md 6: once, not never: the fifth base query has no rank of the four
    late = paid(ASKS, ["x", "y", "z", "w", "A"], ["A"])
    assert (late["multi_hit"], late["precision"]) == (1, pytest.approx(1 / 4))


def test_average_precision_looks_at_the_first_t_queries():
    # 1/|g| (1/1 + 2/3), by hand from Eq. 5
    assert average_precision([True, False, True], 4, 4) == pytest.approx((1 + 2 / 3) / 4)
    assert average_precision([False, True], 4, 2) == pytest.approx(0.25)
    assert average_precision([False] * 4 + [True], 4, 4) == 0  # t = 4
    assert average_precision([], 4, 4) == 0
    found = paid(ASKS, ["A", "noise", "B"], ["noise", "noise", "C"])
    assert found["precision"] == pytest.approx((1 + 2 / 3) / 4)  # t = 2 of the predicted
    assert paid(ASKS, [], ["C"])["precision"] == pytest.approx(1 / 4)


def test_known_gold_counts_in_the_precision_as_printed_or_not():
    known = {"known": ["A"]}
    assert paid(ASKS, ["A", "B"], **known)["precision"] == pytest.approx(2 / 4)
    assert paid(ASKS, ["A", "B"], **known, weights=RewardWeights(pay_known=False))[
        "precision"
    ] == pytest.approx(1 / 2 / 4)


def test_all_gold_and_a_stop_signal_are_paid_before_or_in_this_expansion():
    # SPEC.md 6: "by a pure stop on a complete context or by queries and stop together"
    assert paid(STOPS, known=GOLD)["joint_hit"] == 1
    assert paid(STOPS, ["C", "D"], known=["A", "B"])["joint_hit"] == 1
    assert paid(ASKS, known=GOLD)["joint_hit"] == 0
    assert paid(STOPS, known=GOLD)["total"] == pytest.approx(0.3 + 0.02)


def test_the_total_is_the_weighted_sum():
    both = SteeringOutput(("x", "y"), ("z",), has_think=True, query_tags=2)
    found = paid(both, ["A", "noise"], ["B"])
    assert found["total"] == pytest.approx(0.2 * (1 + 1.25) + 0.2 * (1 / 4 + 1 / 4) + 0.02)
    assert paid(ASKS)["total"] == pytest.approx(0.01)


# -- what makes it 0 -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "known", "cut"),
    [
        (SteeringOutput(("x",), ("y",), query_tags=0), (), False),  # no think segment
        (
            SteeringOutput(("x",), stop=True, has_think=True, query_tags=2),
            (),
            False,
        ),  # stopped before all gold was found
        (ASKS, (), True),  # longer than the limit
        (STOPS, GOLD, True),
        (SteeringOutput(stop=True), GOLD, False),
    ],
)
def test_the_zeroing_rules_beat_every_other_term(output, known, cut):
    found = paid(output, ["A", "B"], ["C"], known=known, truncated=cut)
    assert found["total"] == 0 and found["precision"] > 0
