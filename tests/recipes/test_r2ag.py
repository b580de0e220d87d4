"""R2AG: protocol, prompts, rewards and metrics of one expansion and of a whole tree, and the scripted expert."""

import dataclasses
import math

import numpy as np
import pytest

from rrl.data.passages import Passage
from rrl.data.questions import Question
from rrl.data.trajectory import NOT_FINITE, POLICY, PROMPT, Search, Trajectory
from rrl.errors import UserError
from rrl.miniwiki import KINDS, generate
from rrl.miniwiki.experts import demonstrate
from rrl.recipes.base import NO_MODELS, ScoringContext, uses_chat
from rrl.recipes.card import make_card, read_card, write_card
from rrl.recipes.catalogue import make_recipe
from rrl.recipes.r2ag import INSTRUCTION, R2AG, R2AGEnvironment, generator_prompt
from rrl.recipes.r2ag_forest import Forest, RetrievalTree
from rrl.recipes.r2ag_rewards import RewardWeights, parse_output
from rrl.recipes.rsearch import RSearch
from rrl.rollout.curriculum import ShuffledQuestions
from rrl.rollout.protocol import CONTEXT, EOS, TURN_TOKENS, Episode, Finish, Restart, SearchFor

A, B, NOISE = (Passage(name, name, f"text of {name}") for name in ("A", "B", "Noise"))
QUESTION = Question("q", "Who?", ("Marta Velikov",), gold=("A", "B"))
EMPTY, HALF = RetrievalTree.of(QUESTION), RetrievalTree.of(QUESTION, 0, [A])
STOP = "<think>.</think><base-Q>stop retrieval</base-Q><predicted-Q>none</predicted-Q>"


def asking(*base, predicted=("none",), think="<think>so</think>"):
    boxes = [f"<base-Q>{q}</base-Q>" for q in base] + [f"<predicted-Q>{q}</predicted-Q>" for q in predicted]
    return "\n".join([think, *boxes])


def episode(question, *turns, ended="expanded"):
    """Return a trajectory of turns, each (text, passages of each query)."""
    none = np.zeros(0)
    segments, searches = [], []
    for turn, (text, *found) in enumerate(turns):
        segments += [(PROMPT, "?"), (POLICY, text)]
        searches += [Search(turn, "q", tuple(p.title for p in some), passages=tuple(some)) for some in found]
    return Trajectory(question, 0, 0, *(none,) * 5, segments, searches, ended)


def scored(*arguments, recipe=None, reader=None, **options):
    one = episode(*arguments, **options)
    (recipe or R2AG()).score([one], ScoringContext(reader))
    return one


# -- prompts (Figure A.3) ----------------------------------------------------------------------------------------------


def test_prompt_is_figure_a3():
    printed = (
        "#Decomposition#\nTask: You will be provided with a user question and evidences that may help to answer the question. "
        "Decompose the complex user question into single-hop retrievable sub-questions following these rules:\nSteps:\n1. Base "
        "Questions (<base-Q>):\n- Decompose the current-hop question directly from user question, taking the evidences for "
        'reference (if the user question is "A → B → C", and evidences cover "A", then decompose into "B". Note do not repeat '
        "questions already answered by the provided evidences).\n- Each must target a single fact (WHO/WHEN/WHERE/etc.)\n- If "
        'evidences already answer the user question, respond with "stop retrieval" as the base question.\n\n2. Predicted '
        "Questions (<predicted-Q>):\n- Forecast next-hop questions based on the base questions only if you have knowledge to any "
        "base questions\n- If you have no knowledge to predict further questions, or evidences already answers the user "
        'question, respond with "none" as the predicted question.\n\nKeep your thinking process useful and brief.\n\nWrap '
        'reasoning process inside: <think></think>.\nWrap each of the base questions (or "stop retrieval") inside: '
        '<base-Q></base-Q>.\nWrap each of the predicted question (or "none") inside: <predicted-Q></predicted-Q>'
    )
    assert printed == INSTRUCTION
    asked = R2AG().prompt(HALF).user_message
    assert asked.startswith(INSTRUCTION) and asked.endswith("Who?\n\nEvidences:\n(Title: A) text of A")
    assert R2AG().prompt(QUESTION).user_message.endswith("Evidences:\n(none)")


def test_prompt_of_a_tree_shows_question_and_documents():
    bare = R2AG(environment=R2AGEnvironment(opening="bare"))
    assert bare.prompt(QUESTION).user_message == bare.prompt(EMPTY).user_message == "Who?"
    assert bare.prompt(HALF).user_message == "Who?\n(Title: A) text of A"
    assert uses_chat(bare) and not bare.needs_judge


# -- protocol (2.4, B.1, B.2) ------------------------------------------------------------------------------------------


def test_limits_are_4096_tokens_and_five_expansions():
    # B.2
    environment = R2AGEnvironment()
    assert (environment.stops, environment.turn_tokens, environment.expansions) == ((), 4096, 5)
    for stop in (TURN_TOKENS, CONTEXT):
        assert environment.step(Episode(QUESTION), asking("a"), stop) == Finish("length")
    assert environment.step(Episode(QUESTION), "nothing", EOS) == Finish("no_action")
    assert environment.step(Episode(QUESTION), STOP, EOS) == Finish("stop")


def test_training_searches_every_query_and_expands_a_tree_once():
    environment, text = (
        R2AGEnvironment(base_queries=1, predicted_queries=0),
        asking("a", "b", predicted=("c",)),
    )
    one = Episode(EMPTY, policy_texts=[text])
    assert environment.step(one, text, EOS) == SearchFor("a", ("b", "c"))
    assert environment.observe(one, [A], None, []) == Finish("expanded")
    one.policy_texts.append(text + "<base-Q>stop retrieval</base-Q>")
    assert environment.observe(one, [A]) == Finish("stop")


def test_inference_searches_the_first_t_queries_and_keeps_all_documents():
    text = asking("a", "b", "c", predicted=("d", "e"))
    environment = R2AGEnvironment(base_queries=2, predicted_queries=1, opening="bare")
    one = Episode(QUESTION, policy_texts=[text])
    assert environment.step(one, text, EOS) == SearchFor("a", ("b", "d"))
    base_only = R2AGEnvironment(base_queries=2, predicted_queries=0)
    assert base_only.step(one, text, EOS) == SearchFor("a", ("b",))
    assert base_only.step(one, asking(predicted=("d",)), EOS) == Finish("no_action")
    for found in ((NOISE,), (A, NOISE), ()):
        one.searches.append(Search(0, "a", passages=found))
    again = environment.observe(one, [NOISE], [A, NOISE], None)
    assert isinstance(again, Restart)
    shown = "Who?\n(Title: Noise) text of Noise\n(Title: A) text of A"
    assert again.prompt.user_message == f"{shown}\nThe search failed."  # one of the three searches failed
    assert environment.observe(one, [NOISE], [A, NOISE], []).prompt.user_message == shown
    instructed = dataclasses.replace(environment, opening="instruct").observe(one, None)
    assert instructed.prompt.user_message.endswith("(Title: A) text of A\nThe search failed.")
    one.turn = 4
    assert environment.observe(one, [A]) == Finish("turn_limit")


@pytest.mark.parametrize(
    ("field", "value"), [("expansions", 0), ("base_queries", 0), ("predicted_queries", -1), ("opening", "x")]
)
def test_wrong_fields_of_the_environment_are_refused(field, value):
    with pytest.raises(UserError, match=rf"environment\.{field}="):
        R2AGEnvironment(**{field: value})


def test_r2ag_has_the_forest_as_curriculum_and_other_recipes_shuffle():
    forest = R2AG(trees=1).curriculum([QUESTION] * 3, 2, 7)
    assert isinstance(forest, Forest) and (forest.expansions, forest.trees, forest.seed) == (5, 1, 7)
    (node,) = forest.select(0, 0, 2)
    assert isinstance(node, RetrievalTree) and not node.documents
    assert isinstance(RSearch().curriculum([QUESTION], 1, 0), ShuffledQuestions)


# -- rewards (Eq. 5; its terms are tested in tests/recipes/test_r2ag_rewards.py) ---------------------------------------


def test_default_weights_are_the_papers():
    # B.2
    assert R2AG().weights == RewardWeights()


def test_an_expansion_is_rewarded_for_documents_that_its_tree_lacks():
    found = scored(HALF, (asking("a", "b"), [A], [B, NOISE]))
    # R_MH = 1; R_AP = (1 + 1) / 2, because A was known and counts as Eq. 5 is printed
    assert found.rewards["total"] == pytest.approx(0.2 + 0.2 * 1 + 0.02)
    assert (found.rewards["multi_hit"], found.rewards["precision"]) == (1, 1)
    fresh = scored(HALF, (asking("a", "b"), [A], [B]), recipe=R2AG(pay_known=False))
    assert fresh.rewards["precision"] == pytest.approx(0.25)
    second = scored(EMPTY, (asking("a"), [NOISE, A]))
    assert second.rewards["multi_hit"] == 0  # Hit@Top-1


def test_predicted_queries_have_their_own_weight():
    found = scored(EMPTY, (asking("a", predicted=("b",)), [A], [B]))
    assert found.rewards["multi_hit"] == 1 + 1.25
    (expansion,) = R2AG().parse_expansions(found)
    assert [s.titles for s in expansion.base] == [("A",)] and [s.titles for s in expansion.predicted] == [
        ("B",)
    ]


def test_a_stop_earns_r_jh_on_a_complete_tree_and_zero_on_an_incomplete_one():
    whole = RetrievalTree.of(QUESTION, 0, [A, B])
    assert scored(whole, (STOP,), ended="stop").rewards["total"] == pytest.approx(0.3 + 0.02)
    early = scored(HALF, (asking("b", "stop retrieval"), [NOISE]), ended="stop")
    assert early.rewards["total"] == 0 and early.metrics["zeroed"] == 1
    both = scored(HALF, (asking("b", "stop retrieval"), [B]), ended="stop")
    assert both.rewards["total"] == pytest.approx(0.2 + 0.3 + 0.2 * 0.5 + 0.02)


def test_a_truncated_output_or_one_without_thought_earns_zero():
    assert scored(EMPTY, (asking("a"),), ended="length").rewards["total"] == 0
    assert scored(EMPTY, (asking("a", think=""), [A])).rewards["total"] == 0
    assert scored(EMPTY, ended="no_action").rewards["total"] == 0  # no output


def test_an_output_with_non_finite_logits_earns_zero_and_earlier_ones_keep_their_reward():
    found = (asking("a"), [A])
    assert scored(EMPTY, (asking("a"),), ended=NOT_FINITE).rewards["total"] == 0
    wrote, nothing, whole = (
        scored(QUESTION, *turns, ended=ended).turn_rewards
        for turns, ended in (
            ([found, (asking("b"),)], NOT_FINITE),
            ([found], NOT_FINITE),
            ([found], "turn_limit"),
        )
    )
    assert nothing == whole and whole[0] > 0 and wrote == {**whole, 1: 0}


def test_advantages_compare_the_samples_of_one_tree():
    some = [scored(EMPTY, (asking("a"), [found])) for found in (A, NOISE)]
    advantages = R2AG().advantages(some)
    assert advantages == pytest.approx([0.7071, -0.7071], abs=1e-3)
    assert not R2AG().excluded(some).any()


# -- a whole tree ------------------------------------------------------------------------------------------------------


def test_a_whole_tree_has_retrieval_metrics_and_the_generators_answer():
    asked = []

    def generator(prompts):
        asked.extend(prompts)
        return ["Marta Velikov"]

    found = scored(
        QUESTION, (asking("a"), [NOISE]), (asking("a"), [A]), (STOP,), ended="stop", reader=generator
    )
    metrics = found.metrics
    assert (metrics["recall"], metrics["full_recall"], metrics["hits"], metrics["passages"]) == (0.5, 0, 1, 2)
    assert metrics["map"] == pytest.approx(0.25)  # A at rank 2, of two gold ones
    assert (metrics["iterations"], metrics["searches"], metrics["em"], found.answer) == (
        3,
        2,
        1,
        "Marta Velikov",
    )
    (prompt,) = asked
    assert (
        prompt.user_message.index("(Title: Noise)")
        < prompt.user_message.index("(Title: A)")
        < prompt.user_message.index("Who?")
    )
    # the last expansion stopped too early and earns 0; the second is rewarded for its documents
    assert found.turn_rewards == {0: 0.02, 1: pytest.approx(0.2 + 0.1 + 0.02), 2: 0}
    assert found.rewards["total"] == pytest.approx(sum(found.turn_rewards.values()))


def test_documents_of_earlier_expansions_are_not_new_and_count_for_the_stop():
    found = scored(
        QUESTION, (asking("a"), [A]), (asking("a", "b"), [A], [B]), (asking("stop retrieval"),), ended="stop"
    )
    assert (found.rewards["multi_hit"], found.rewards["joint_hit"]) == (2, 1)
    assert found.turn_rewards[2] == pytest.approx(0.3 + 0.02)


def test_generator_prompt_shows_multiple_choices():
    # as in LongBench-v2
    prompt_text = generator_prompt(Question("q", "Which?", ("B",), choices=("one", "two")), [A]).user_message
    assert prompt_text.index("(Title: A)") < prompt_text.index("Which?\n(A) one\n(B) two")


def test_training_does_not_call_the_generator():
    def generator(prompts):
        raise AssertionError("asked")

    assert "em" not in scored(EMPTY, (asking("a"), [A]), reader=generator).metrics


def test_a_question_without_gold_passages_has_zero_reward_and_recall():
    found = scored(Question("q", "Who?", ("x",)), (STOP,), ended="stop")
    assert found.rewards["total"] == 0 and math.isnan(found.metrics["recall"])
    R2AG().score([], NO_MODELS)


# -- card, expert ------------------------------------------------------------------------------------------------------


def test_card_holds_the_fields_that_differ_from_the_defaults(tmp_path):
    recipe = make_recipe("r2ag", {"trees": 8}, {"opening": "bare", "predicted_queries": 0})
    write_card(tmp_path, make_card(recipe, 640, 1))
    assert read_card(tmp_path).make() == recipe


@pytest.mark.parametrize("kind", KINDS)
def test_expert_searches_in_parallel_finds_all_gold_and_stops(kind):
    wiki = generate("train", 0, 200)
    titles = {passage.title: passage for passage in wiki.passages}
    recipe = R2AG(environment=R2AGEnvironment(opening="bare"), shown_misses=0.0)
    hops = {"one_hop": 1, "two_hop": 2, "three_hop": 3, "comparison": 1, "bridge_comparison": 2}[kind]
    for item in wiki.questions(kind, 5, 0):
        found = {hop.query: titles[hop.title] for hop in item.plan.hops}
        shown = demonstrate(recipe, item, lambda query, found=found: [found[query]])
        own = [parse_output(text) for text in shown if isinstance(text, str)]
        assert len(own) == hops + 1 and own[-1].stop and not any(p.stop for p in own[:-1])
        assert all(p.has_think and not p.predicted for p in own)
        assert {found[query].title for p in own for query in p.base} == set(item.question.gold)
        last = [segment for segment in shown if isinstance(segment, Restart)][-1]
        assert all(hop.sentence in last.prompt.user_message for hop in item.plan.hops)


def test_demonstrated_misses_are_repeated_queries_or_irrelevant_documents():
    wiki = generate("train", 0, 200)
    titles = {passage.title: passage for passage in wiki.passages}
    recipe = R2AG(environment=R2AGEnvironment(opening="bare"), shown_misses=1.0)
    for kind, more in (("comparison", 1), ("two_hop", 0)):
        item = wiki.questions(kind, 1, 0)[0]
        found = {hop.query: titles[hop.title] for hop in item.plan.hops}
        shown = demonstrate(recipe, item, lambda query, found=found: [found[query], NOISE])
        prompts = [segment.prompt.user_message for segment in shown if isinstance(segment, Restart)]
        assert len(prompts) == (2 if kind == "two_hop" else 1) + more
        assert any("(Title: Noise)" in prompt for prompt in prompts) == (not more)


def test_a_query_that_misses_its_passage_ends_the_demonstration():
    item = generate("train", 0, 200).questions("two_hop", 1, 0)[0]
    assert len(demonstrate(R2AG(), item, lambda query: [NOISE])) == 1
