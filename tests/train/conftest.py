"""Fixtures of the training-loop tests."""

import pytest

from rrl.miniwiki import generate
from rrl.models.tokenizer import train_tokenizer
from rrl.recipes.rsearch import RSearch
from rrl.retrieval.index import make_retriever
from rrl.rollout.config import EngineConfig
from rrl.rollout.engine import Engine
from rrl.rollout.protocol import Stream
from tests.train.small_run import CONFIG, fresh, run


@pytest.fixture(scope="module")
def parts():
    wiki = generate("train", 0, 100)
    questions = [item.question for item in wiki.questions("one_hop", 12, 0)]
    tokenizer = train_tokenizer([p.text for p in wiki.passages] + [q.text for q in questions], 400)
    retriever = make_retriever(wiki.passages, "bm25")
    recipe = RSearch(instruction="", environment=Stream(max_searches=1, turn_tokens=8, observation_tokens=30))
    sizes = EngineConfig(rows=8, context=128, wake_threshold=4, prefill_tokens=32)
    return questions, Engine(fresh(), tokenizer, sizes, retriever=retriever), recipe


@pytest.fixture(scope="module")
def whole(parts, tmp_path_factory):
    """An uninterrupted run: its workdir, outcome and parameters."""
    workdir = tmp_path_factory.mktemp("whole")
    return workdir, *run(parts, workdir, CONFIG)
