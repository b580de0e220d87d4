"""A small built-in world, a random policy and requests, for the tests of the engine."""

import dataclasses

from flax import nnx

from rrl.miniwiki import generate
from rrl.models.config import DecoderConfig
from rrl.models.decoder import Decoder
from rrl.models.tokenizer import train_tokenizer
from rrl.retrieval.index import make_retriever
from rrl.rollout.episodes import Request
from rrl.text.chat import chat_ids


def greedy_groups(requests):
    """Return four greedy samples for each of the first four questions: drafts from earlier samples are correct."""
    return [
        dataclasses.replace(request, seed=4 * group + sample, group=group, temperature=0.0)
        for group, request in enumerate(requests[:4])
        for sample in range(4)
    ]


def make_world():
    """Return a decoder, its tokenizer, a retriever, and twenty requests."""
    wiki = generate("train", 0, 100)
    questions = [item.question for item in wiki.questions("one_hop", 20, 0)]
    texts = [p.text for p in wiki.passages] + [q.text for q in questions]
    tokenizer = train_tokenizer(texts, 400)
    config = DecoderConfig.from_hf(
        {
            "model_type": "qwen2",
            "vocab_size": 416,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "intermediate_size": 64,
            "rope_theta": 10000.0,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "max_position_embeddings": 512,
        }
    )
    decoder = Decoder(config, rngs=nnx.Rngs(1))
    retriever = make_retriever(wiki.passages, "bm25")
    requests = [Request(q, chat_ids(tokenizer, q.text), seed, seed) for seed, q in enumerate(questions)]
    return decoder, tokenizer, retriever, requests
