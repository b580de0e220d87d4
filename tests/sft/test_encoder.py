"""Training of the text encoder: loss, batches, determinism; and recall of the shipped encoder."""

import hashlib
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from rrl.errors import UserError
from rrl.miniwiki import generate
from rrl.models.tokenizer import load_tokenizer
from rrl.retrieval.bm25 import Bm25Config
from rrl.retrieval.encoder_folder import load_text_encoder
from rrl.retrieval.folder import KINDS
from rrl.retrieval.index import make_retriever
from rrl.retrieval.settings import TextSettings
from rrl.sft.encoder import (
    EncoderTrainingConfig,
    batches,
    contrastive_loss,
    train_and_save,
    train_encoder,
)
from rrl.sft.encoder_pairs import make_pairs
from rrl.sft.encoder_recall import miniwiki_recall

ASSETS = Path(__file__).resolve().parents[2] / "assets"
SMALL = EncoderTrainingConfig(
    hidden=32,
    heads=2,
    mlp=32,
    worlds=4,
    passages_per_world=50,
    steps=8,
    groups=2,
    queries_per_group=16,
    warmup=2,
)


def test_the_loss_is_the_cross_entropy_of_the_positive_passage() -> None:
    queries, passages = np.float32([[1, 0], [0, 1]]), np.float32([[1, 0], [0, 1], [0.6, 0.8]])
    allowed = np.array([[True, True, True], [True, True, False]])
    loss, accuracy = contrastive_loss(jnp.array(queries), jnp.array(passages), jnp.array(allowed), 0.5)
    first = -np.log(np.exp(2) / (np.exp(2) + 1 + np.exp(1.2)))
    second = -np.log(np.exp(2) / (np.exp(2) + 1))
    assert float(loss) == pytest.approx((first + second) / 2, rel=1e-5)
    assert float(accuracy) == 1


def test_pairs_point_at_gold_passages_and_hard_negatives_of_the_same_world() -> None:
    pairs = make_pairs(0, 2, 100)
    for kind, table in pairs.by_passage.items():
        assert any(table), kind
        for at, options in enumerate(table):
            for query in options:
                assert at in pairs.gold[query]
                assert pairs.passages[at].title in pairs.queries[query]
    worlds = np.repeat([0, 1], 100)
    for at, others in enumerate(pairs.hard_negatives):
        assert at not in others
        assert all(worlds[other] == worlds[at] for other in others)
    assert sum(bool(others) for others in pairs.hard_negatives) > 100


def test_other_gold_passages_do_not_count_as_negatives() -> None:
    tokenizer = load_tokenizer(ASSETS / "miniwiki-tokenizer")
    config = EncoderTrainingConfig(
        worlds=2, passages_per_world=60, groups=2, queries_per_group=50, questions=1.0, names=0.0
    )
    pairs = make_pairs(0, 2, 60)
    stream = batches(config, pairs, tokenizer, TextSettings(query_tokens=32, passage_tokens=64))
    batch = next(stream)
    own = np.arange(100)
    assert batch.queries.shape == (100, 32)
    assert batch.passages.shape == (200, 64)
    assert batch.allowed[own, own].all()
    assert not batch.allowed.all(), (
        "comparison questions have two gold passages, and some batches contain both"
    )
    again = next(batches(config, pairs, tokenizer, TextSettings(query_tokens=32, passage_tokens=64)))
    np.testing.assert_array_equal(batch.queries, again.queries)


def test_the_same_seed_gives_the_same_weights() -> None:
    tokenizer = load_tokenizer(ASSETS / "miniwiki-tokenizer")
    passages = generate("test", 0, 50).passages
    first, second = (train_encoder(SMALL, tokenizer).embed_passages(passages) for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_wrong_settings_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="queries_per_group=80: a world has only 50"):
        EncoderTrainingConfig(passages_per_world=50, queries_per_group=80)
    for field in ("steps", "worlds", "groups", "layers"):
        with pytest.raises(UserError, match=f"{field}=0 must be at least 1"):
            EncoderTrainingConfig(**{field: 0})
    for wrong in ({"temperature": 0.0}, {"learning_rate": -1.0}, {"names": 0.6, "questions": 0.6}):
        with pytest.raises(UserError, match=f"{next(iter(wrong))}="):
            EncoderTrainingConfig(**wrong)
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="exists"):
        train_and_save(SMALL, str(ASSETS / "miniwiki-tokenizer"), str(tmp_path))
    with pytest.raises(UserError, match="tokenizer"):
        train_and_save(SMALL, str(tmp_path / "none"), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_the_shipped_encoder_finds_gold_passages_of_unseen_worlds(kind: str) -> None:
    wiki = generate("test", 3, 800, 4)
    encoder = load_text_encoder(ASSETS / "miniwiki-encoder")
    recall = miniwiki_recall(
        make_retriever(wiki.passages, kind, encoder, Bm25Config(title_weight=3)), wiki, questions=50
    )
    assert min(recall.values()) >= 0.97


def test_the_shipped_encoder_uses_the_shipped_tokenizer() -> None:
    own, world = (ASSETS / name / "tokenizer.json" for name in ("miniwiki-encoder", "miniwiki-tokenizer"))
    assert own.read_bytes() == world.read_bytes(), "the tokenizer changed: retrain the encoder"


def test_the_shipped_encoder_is_small_and_has_the_documented_hash() -> None:
    folder = ASSETS / "miniwiki-encoder"
    assert sum(file.stat().st_size for file in folder.iterdir()) < 8 * 2**20
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert digest in (folder / "README.md").read_text()
