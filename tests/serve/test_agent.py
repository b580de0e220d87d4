"""Tests of the agent, with a tiny policy that has memorised two demonstrations."""

import dataclasses
import threading

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import rrl
from rrl.data.questions import Question
from rrl.errors import UserError
from rrl.miniwiki import generate
from rrl.models.config import DecoderConfig
from rrl.models.decoder import Decoder
from rrl.models.hf import save_decoder
from rrl.models.tokenizer import train_tokenizer
from rrl.recipes.card import make_card, read_card, write_card
from rrl.recipes.rsearch import RSearch
from rrl.retrieval.build import build_index
from rrl.retrieval.index import make_retriever
from rrl.rl.logprobs import token_logprobs
from rrl.rl.packing import pack
from rrl.rollout.protocol import Stream
from rrl.sft.demonstrations import demonstration_examples
from tests.memory import memory_maps

pytestmark = pytest.mark.slow

RECIPE = RSearch(instruction="", environment=Stream(turn_tokens=224, observation_tokens=160, max_searches=3))
TOP_K = 2


def memorise(decoder, batch, steps):
    graph, params = nnx.split(decoder)
    optimizer = optax.adam(optax.cosine_decay_schedule(5e-3, steps))

    @jax.jit
    def learn(params):
        def loss(params):
            scores = token_logprobs(nnx.merge(graph, params), batch)
            return -jnp.sum(jnp.where(batch.loss_mask, scores.logp, 0)) / jnp.sum(batch.loss_mask)

        def step(carry, _):
            value, gradient = jax.value_and_grad(loss)(carry[0])
            updates, state = optimizer.update(gradient, carry[1])
            return (optax.apply_updates(carry[0], updates), state), value

        (params, _), losses = jax.lax.scan(step, (params, optimizer.init(params)), length=steps)
        return params, losses

    params, losses = learn(params)
    nnx.update(decoder, params)
    return float(losses[-1])


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """(folder of the policy, folder of the index, the memorised questions)."""
    folder = tmp_path_factory.mktemp("agent")
    wiki = generate("train", 0, 100)
    items = wiki.questions("two_hop", 2, 0)
    retriever = make_retriever(wiki.passages, "bm25")
    tokenizer = train_tokenizer([p.text for p in wiki.passages] + [i.question.text for i in items], 400)
    examples = demonstration_examples(RECIPE, tokenizer, items, retriever, TOP_K)
    config = DecoderConfig.from_hf(
        {
            "model_type": "qwen2",
            "vocab_size": 416,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 128,
            "rope_theta": 10000.0,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "max_position_embeddings": 1024,
        }
    )
    decoder = Decoder(config, rngs=nnx.Rngs(0))
    batch = pack(
        [e.tokens for e in examples], [e.loss_mask for e in examples], max(len(e.tokens) for e in examples)
    ).batch
    assert memorise(decoder, jax.tree.map(jnp.asarray, batch), 240) < 0.01
    save_decoder(folder / "policy", decoder, tokenizer)
    write_card(folder / "policy", make_card(RECIPE, 1024, TOP_K))
    build_index(wiki.passages, folder / "index", "bm25")
    return folder / "policy", folder / "index", [item.question for item in items]


@pytest.fixture(scope="module")
def agent(known):
    return rrl.Agent.load(known[0], recipe="rsearch", index=known[1], rows=2)


def test_the_agent_searches_and_answers_as_in_its_demonstrations(agent, known):
    question = known[2][0]
    trajectory = agent.ask(question)
    assert trajectory.ended == "answer"
    assert trajectory.metrics["em"] == 1
    assert len(trajectory.searches) == 2
    assert set(question.gold) <= {title for search in trajectory.searches for title in search.titles}


def test_a_question_given_as_text_is_answered_without_scores(agent, known):
    trajectory = agent.ask(known[2][0].text)
    assert trajectory.answer == agent.ask(known[2][0]).answer
    assert trajectory.question.answers == ()
    assert not trajectory.rewards
    assert not trajectory.metrics


def test_the_stream_yields_all_events_in_order(agent, known):
    events = list(agent.stream(known[2][1]))
    kinds = [event.kind for event in events]
    assert [kind for kind in kinds if kind != "reasoning"] == [
        *("search", "observation", "search", "observation", "evidence", "answer", "end")
    ]
    assert events[-1].trajectory.segments == agent.ask(known[2][1]).segments
    found = [event.titles for event in events if event.kind == "observation"]
    assert found == [search.titles for search in events[-1].trajectory.searches]
    assert all(str(event).strip() for event in events)


def test_ask_all_equals_ask_for_each_question(agent, known):
    questions = [known[2][0], known[2][1], known[2][0]]
    together = agent.ask_all(questions)
    for question, trajectory in zip(questions, together, strict=True):
        assert trajectory.segments == agent.ask(question).segments


def test_calls_from_several_threads_run_one_after_another(agent, known):
    found = {}
    threads = [
        threading.Thread(target=lambda n=n: found.update({n: agent.ask(known[2][n % 2])})) for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[n].question for n in range(4)] == [known[2][n % 2] for n in range(4)]


def test_show_displays_html_in_a_notebook_and_text_in_a_shell(agent, known, capsys):
    trajectory = agent.ask(known[2][0])
    page = trajectory._repr_html_()
    assert "segment search sampled" in page
    trajectory.show()
    assert known[2][0].text in capsys.readouterr().out


def test_the_recipe_card_states_how_the_policy_was_trained(known):
    card = read_card(known[0])
    assert card.make() == RECIPE
    assert (card.context, card.top_k) == (1024, TOP_K)
    assert card.fields == {"instruction": ""}


def test_a_recipe_object_overrides_the_card(known):
    recipe = dataclasses.replace(RECIPE, use_evidence=False)
    assert rrl.Agent.load(known[0], recipe=recipe, index=known[1]).recipe is recipe


@pytest.mark.parametrize("text", ['{"colour": 3}', '{"recipe": "rsearch", "context": "wide"}'])
def test_an_invalid_card_is_refused_by_name(tmp_path, text):
    (tmp_path / "rrl_recipe.json").write_text(text)
    with pytest.raises(UserError, match=r"rrl_recipe.json.*(colour|context='wide')"):
        read_card(tmp_path)


def test_missing_folders_and_empty_questions_are_refused_by_name(agent, known, tmp_path):
    with pytest.raises(UserError, match=r"config\.json"):
        rrl.Agent.load(tmp_path)
    with pytest.raises(UserError, match="recipe"):
        rrl.Agent.load(known[0], recipe="unknown")
    with pytest.raises(UserError, match="empty"):
        agent.ask(" ")
    with pytest.raises(UserError, match="empty"):
        list(agent.stream(Question("1", "", ("a",))))


def test_a_closed_agent_releases_its_programs_and_refuses_questions(known):
    with rrl.Agent.load(known[0], recipe="rsearch", index=known[1], rows=2) as agent:
        agent.ask(known[2][0])
        compiled = memory_maps()
    assert memory_maps() < compiled - 100
    with pytest.raises(UserError, match="closed"):
        agent.ask(known[2][0])
