"""Training on input-output pairs (R3-RAG 3.2.2): what is masked, held out and dropped."""

import json

import numpy as np
import pytest

from rrl.errors import UserError
from rrl.miniwiki import generate
from rrl.miniwiki.experts import demonstrate
from rrl.models.tokenizer import load_tokenizer
from rrl.recipes.r3rag import R3Rag
from rrl.sft.demonstrations import demonstration_examples
from rrl.sft.pairs import PairsConfig, load_pairs
from rrl.text.chat import chat_ids
from tests.sft.cold_start_runs import config, write_pairs


def test_the_loss_is_on_outputs_only_and_training_shares_no_question_with_held_out(tmp_path):
    tokenizer = load_tokenizer("assets/miniwiki-tokenizer")
    rows = write_pairs(tmp_path / "pairs.jsonl")
    train, held_out = load_pairs(PairsConfig(path=str(tmp_path / "pairs.jsonl"), held_out=2), tokenizer, 500)
    assert (len(train), len(held_out)) == (8, 4)
    for example, row in zip([*train, *held_out], rows, strict=True):
        prompt = chat_ids(tokenizer, row["input"])
        np.testing.assert_array_equal(example.tokens[: len(prompt)], prompt)
        assert not example.loss_mask[: len(prompt)].any() and example.loss_mask[len(prompt) :].all()
        targets = example.tokens[example.loss_mask]
        assert tokenizer.decode(targets[:-1]) == row["output"] and targets[-1] == tokenizer.eos_token_id


def test_pairs_are_tokenised_like_demonstrations(tmp_path):
    tokenizer = load_tokenizer("assets/miniwiki-tokenizer")
    wiki = generate("train", 0, 200)
    items = wiki.questions("two_hop", 2, 0)
    recipe = R3Rag()

    class Retriever:
        needs_embeddings = False

        def search(self, queries, k, vectors):
            hit = type("Hit", (), {"passage": wiki.passages[0]})
            return [[hit] for _ in queries]

    demonstrated = demonstration_examples(recipe, tokenizer, items, Retriever(), 1)
    rows = []
    for item in items:
        prompts = [recipe.prompt(item.question)]
        for segment in demonstrate(recipe, item, lambda query: [wiki.passages[0]]):
            if isinstance(segment, str):
                rows.append({"id": item.question.id, "input": prompts[-1], "output": segment})
            else:
                prompts.append(segment.prompt)
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train, held_out = load_pairs(PairsConfig(path=str(tmp_path / "p.jsonl"), held_out=1), tokenizer, 1000)
    for one, other in zip([*train, *held_out], demonstrated, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.loss_mask, other.loss_mask)


def test_long_pairs_are_dropped_and_a_file_with_too_few_pairs_is_refused(tmp_path, capsys):
    tokenizer = load_tokenizer("assets/miniwiki-tokenizer")
    path = tmp_path / "pairs.jsonl"
    write_pairs(path)
    with path.open("a") as stream:
        stream.write(json.dumps({"id": "q0", "input": "long " * 300, "output": "x"}) + "\n")
    train, _ = load_pairs(PairsConfig(path=str(path), held_out=1), tokenizer, 300)
    assert len(train) == 10 and "1 longer than 300 tokens" in capsys.readouterr().err
    with pytest.raises(UserError, match="leave 0 pairs to train on"):
        load_pairs(PairsConfig(path=str(path), held_out=6), tokenizer, 300)
    path.write_text('{"input": "a"}\n')
    with pytest.raises(UserError, match="line 1: output: missing"):
        load_pairs(PairsConfig(path=str(path)), tokenizer, 300)
    with pytest.raises(UserError, match="is not a file; give the pairs"):
        PairsConfig(path=str(tmp_path / "none"))


def test_training_on_pairs_uses_the_settings_of_the_paper():
    # SPEC.md 2: lr 1e-5 / 7e-6, batch 8 / 16, at most 4,096 tokens (appendix C: Llama, Qwen)
    qwen, llama = config("size=7b", "r3rag_sft"), config("size=8b", "r3rag_sft")
    assert (qwen.optim.lr, qwen.train.rows, qwen.train.row_length) == (7e-6, 16, 4096)
    assert (llama.optim.lr, llama.train.rows, llama.train.row_length) == (1e-5, 8, 4096)
