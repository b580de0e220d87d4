"""R2AG, Eq. 5: parsing of outputs, each term computed by hand, and every zeroing rule."""

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


# -- parsing (Figure A.3, B.2) -----------------------------------------------------------------------------------------


def test_queries_are_read_from_tags_after_the_thought():
    asked = "<base-Q> one </base-Q><base-Q>two</base-Q>\n<predicted-Q>three</predicted-Q>"
    text = f"<think>First <base-Q>no</base-Q> this.</think>\n{asked}"
    assert parse_output(text) == SteeringOutput(("one", "two"), ("three",), has_think=True, query_tags=2)
    more = "<think>a</think><base-Q>one</base-Q><think>b <base-Q>no</base-Q></think><base-Q>two</base-Q>"
    assert parse_output(more).base == ("one", "two")
    stray = "</think><base-Q>no</base-Q><think>a</think><base-Q>one</base-Q>"
    assert parse_output(stray) == SteeringOutput(("one",), has_think=True, query_tags=1)


def test_stop_retrieval_and_none_are_not_queries():
    text = "<think>.</think><base-Q> Stop  retrieval. </base-Q><predicted-Q>None</predicted-Q>"
    assert parse_output(text) == SteeringOutput(stop=True, has_think=True, query_tags=2)
    both = '<think>.</think><base-Q>one</base-Q><base-Q>"stop retrieval"</base-Q><predicted-Q></predicted-Q>'
    assert parse_output(both) == SteeringOutput(("one",), stop=True, has_think=True, query_tags=2)
    curly = "<think>.</think><base-Q>“Stop retrieval”</base-Q>"
    assert parse_output(curly) == SteeringOutput(stop=True, has_think=True, query_tags=1)
    swapped = "<think>.</think><base-Q>none</base-Q><predicted-Q>Stop retrieval!</predicted-Q>"
    assert parse_output(swapped) == SteeringOutput(has_think=True, query_tags=2)


@pytest.mark.parametrize("text", ["", "no tags", "<base-Q>", "<think></think>", "<base-Q> </base-Q>"])
def test_an_output_without_query_tags_has_no_queries(text):
    found = parse_output(text)
    assert not found.base and not found.predicted and not found.stop


def test_queries_without_a_thought_are_read_without_format_reward():
    assert parse_output("<base-Q>one</base-Q><predicted-Q>two</predicted-Q>") == SteeringOutput(
        ("one",), ("two",)
    )


# -- Eq. 5, term by term -----------------------------------------------------------------------------------------------


def test_default_coefficients_are_the_papers():
    # B.2: alpha 0.2, beta 0.3, gamma 0.2, l 1.25, 0.01 each, t 4 and 2
    w = RewardWeights()
    assert (w.multi_hit, w.joint_hit, w.precision, w.predicted, w.format) == (0.2, 0.3, 0.2, 1.25, 0.01)
    assert (w.top_base, w.top_predicted) == (4, 2)


def test_r_mh_counts_new_gold_documents_and_weighs_predicted_ones_by_l():
    found = paid(ASKS, ["A", "noise", "B"], ["C", "noise"], known=["B"])
    assert found["multi_hit"] == 1 + 1.25  # A, and C by a predicted query; B was known
    assert paid(ASKS, ["a "], gold=["A"])["multi_hit"] == 1  # titles match regardless of case and space


def test_a_gold_document_hit_twice_counts_once():
    # in R_MH and in R_AP
    twice = paid(ASKS, ["A", "A"], ["A"])
    assert twice["multi_hit"] == 1
    assert twice["precision"] == pytest.approx(1 / 4)
    # once, not never: the fifth base query is beyond the top four
    late = paid(ASKS, ["x", "y", "z", "w", "A"], ["A"])
    assert (late["multi_hit"], late["precision"]) == (1, pytest.approx(1 / 4))


def test_average_precision_uses_the_first_t_queries():
    # 1/|g| (1/1 + 2/3), by hand from Eq. 5
    assert average_precision([True, False, True], 4, 4) == pytest.approx((1 + 2 / 3) / 4)
    assert average_precision([False, True], 4, 2) == pytest.approx(0.25)
    assert average_precision([False] * 4 + [True], 4, 4) == 0  # t = 4
    assert average_precision([], 4, 4) == 0
    found = paid(ASKS, ["A", "noise", "B"], ["noise", "noise", "C"])
    assert found["precision"] == pytest.approx((1 + 2 / 3) / 4)  # t = 2 for predicted queries
    assert paid(ASKS, [], ["C"])["precision"] == pytest.approx(1 / 4)


def test_pay_known_decides_whether_known_gold_counts_in_r_ap():
    known = {"known": ["A"]}
    assert paid(ASKS, ["A", "B"], **known)["precision"] == pytest.approx(2 / 4)
    assert paid(ASKS, ["A", "B"], **known, weights=RewardWeights(pay_known=False))[
        "precision"
    ] == pytest.approx(1 / 2 / 4)


def test_r_jh_needs_all_gold_and_a_stop_signal():
    # by a stop alone on a complete context, or by queries and a stop together
    assert paid(STOPS, known=GOLD)["joint_hit"] == 1
    assert paid(STOPS, ["C", "D"], known=["A", "B"])["joint_hit"] == 1
    assert paid(ASKS, known=GOLD)["joint_hit"] == 0
    assert paid(STOPS, known=GOLD)["total"] == pytest.approx(0.3 + 0.02)


def test_total_is_the_weighted_sum():
    both = SteeringOutput(("x", "y"), ("z",), has_think=True, query_tags=2)
    found = paid(both, ["A", "noise"], ["B"])
    assert found["total"] == pytest.approx(0.2 * (1 + 1.25) + 0.2 * (1 / 4 + 1 / 4) + 0.02)
    assert paid(ASKS)["total"] == pytest.approx(0.01)


# -- zeroing rules -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "known", "cut"),
    [
        (SteeringOutput(("x",), ("y",), query_tags=0), (), False),  # no think segment
        (
            SteeringOutput(("x",), stop=True, has_think=True, query_tags=2),
            (),
            False,
        ),  # stopped before all gold documents were found
        (ASKS, (), True),  # truncated at the token limit
        (STOPS, GOLD, True),
        (SteeringOutput(stop=True), GOLD, False),
    ],
)
def test_zeroing_rules_override_all_terms(output, known, cut):
    found = paid(output, ["A", "B"], ["C"], known=known, truncated=cut)
    assert found["total"] == 0 and found["precision"] > 0
