"""Judge examples: the prompts that a judge receives, with the oracle's score and reasons, from separate worlds."""

import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

from rrl.errors import UserError
from rrl.miniwiki import generate
from rrl.models.tokenizer import load_tokenizer
from rrl.rewards.judge_card import read_judge_card
from rrl.rewards.judge_prompts import Correctness, Relevance, Sufficiency, Thinking, gold_text
from rrl.rewards.oracle import Oracle
from rrl.rl.optim import OptimConfig
from rrl.runs.metrics import read_metrics
from rrl.sft import stage_data
from rrl.sft.config import SFTConfig
from rrl.sft.judge_agreement import held_out_judge_examples
from rrl.sft.judge_examples import (
    PROMPT_KINDS,
    JudgeExamplesConfig,
    make_judge_examples,
    tokenize_judge_examples,
)
from rrl.text.chat import fitting_ids
from rrl.train import experiment
from tests.train.made import ROOT, config, save_random_policy, shrink_run

WIKI = generate("train", 3, 200)
OPTIONS = JudgeExamplesConfig()
EXAMPLES = list(make_judge_examples(WIKI, 0, 12, OPTIONS))


def test_an_answer_parses_to_the_score_of_the_oracle():
    scores = Oracle().grade([example.prompt for example in EXAMPLES])
    assert [example.score for example in EXAMPLES] == scores
    assert [example.prompt.parse(example.answer) for example in EXAMPLES] == scores


def test_every_question_gives_every_kind_of_prompt_and_scores_vary():
    for kind in PROMPT_KINDS:
        scores = [example.score for example in EXAMPLES if type(example.prompt) is kind]
        assert len(scores) == 60
        assert len(set(scores)) >= (2 if kind in (Sufficiency, Correctness) else 5)
        _, counts = np.unique(scores, return_counts=True)
        assert counts.max() < 0.75 * len(scores)


def test_the_reasons_of_an_answer_agree_with_its_score():
    for example in EXAMPLES:
        prompt, answer = example.prompt, example.answer
        if isinstance(prompt, Sufficiency):
            assert ("unknown" in answer) == (example.score == 0)
            stated = re.findall(r"The [\w ]+? of (.+?) is (?!unknown)", answer)
            assert set(stated) <= set(prompt.transcript.titles)
        elif isinstance(prompt, Relevance):
            assert ("nothing" in answer) == (example.score == 0)
            shown = {passage.title for passage in prompt.passages}
            assert all(
                (title in answer) == (title in shown)
                for title in prompt.question.gold
                if title not in answer.partition(" : ")[0]
            )
        elif isinstance(prompt, Thinking):
            assert ("unknown" in answer or "nothing" not in answer) == (
                example.score < 1
            ) or example.score == 1
        elif isinstance(prompt, Correctness):
            assert f"{gold_text(prompt.question)} : {prompt.predicted}" in answer


def test_a_training_example_is_prompt_and_answer_with_the_loss_on_the_answer():
    tokenizer = load_tokenizer("assets/miniwiki-tokenizer")
    for judge_example, example in zip(
        EXAMPLES, tokenize_judge_examples(iter(EXAMPLES), tokenizer, OPTIONS.card), strict=True
    ):
        prompt = fitting_ids(
            tokenizer, OPTIONS.card.prompt_for(judge_example.prompt), 10_000
        )  # nothing is cut
        assert len(example) <= OPTIONS.context
        np.testing.assert_array_equal(example.tokens[~example.loss_mask], prompt)
        answer = example.tokens[example.loss_mask]
        assert len(answer) <= OPTIONS.answer_tokens and answer[-1] == tokenizer.eos_token_id
        text = tokenizer.decode(answer, skip_special_tokens=True)
        assert judge_example.prompt.parse(text.strip()) == judge_example.score


def test_the_same_arguments_give_the_same_examples_and_another_seed_others():
    again = list(make_judge_examples(WIKI, 0, 12, OPTIONS))
    assert again == EXAMPLES
    assert [example.answer for example in make_judge_examples(WIKI, 1, 12, OPTIONS)] != [
        v.answer for v in EXAMPLES
    ]


def test_held_out_examples_share_no_name_with_training(monkeypatch):
    made = []

    def spy(split, seed, passages, worlds=1):
        made.append((split, seed))
        return generate(split, seed, passages, worlds)

    monkeypatch.setattr(stage_data, "generate", spy)
    settings = SFTConfig(steps=1, optim=OptimConfig(total_steps=1), rows=2, row_length=768)
    data = {"worlds": 1, "steps_per_block": 2, "probes": 5, "options": {}}
    tokenizer = load_tokenizer("assets/miniwiki-tokenizer")
    source, probes = stage_data.STAGES["verdicts"](data, settings, tokenizer, pathlib.Path("unused"))
    assert {split for split, _ in made} == {"dev"}
    assert set(probes) == {kind.__name__.lower() for kind in PROMPT_KINDS} and all(probes.values())
    made.clear()
    text = tokenizer.decode(source.batch(0).tokens.reshape(-1))
    ((split, seed),) = made
    assert split == "train" and seed >= 1000
    held_out = {
        passage.title
        for example in held_out_judge_examples(10, OPTIONS)
        if isinstance(example.prompt, Relevance)
        for passage in example.prompt.passages
    }
    trained = set(re.findall(r"\(Title: ([^)]*)\)", text))
    assert trained and held_out and not trained & held_out


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"faulty": 1.5}, r"data\.options\.faulty=1\.5 must lie in 0\.\.1"),
        ({"partial": -1}, r"data\.options\.partial=-1 must lie in 0\.\.1"),
        ({"top_k": 0}, r"data\.options\.top_k=0 must be at least 1"),
        ({"context": 100}, r"data\.options\.context=100 must hold answer_tokens=160"),
    ],
)
def test_the_error_for_a_wrong_field_names_it(fields, message):
    with pytest.raises(UserError, match=message):
        JudgeExamplesConfig(**fields)


def test_the_config_lists_every_option_with_its_default():
    filled = config("miniwiki_judge")
    assert JudgeExamplesConfig(**filled.data.options) == OPTIONS and len(filled.data.options) == 5
    assert OPTIONS.card.cases == ("Relevance", "Sufficiency", "Thinking", "Correctness")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Run two steps of the command from a random model. Returns its folder and its output."""
    path = tmp_path_factory.mktemp("judge")
    save_random_policy(path / "random")
    command = [
        *(sys.executable, "launch/sft.py", f"--workdir={path}/run"),
        f"--config=configs/miniwiki_judge.py:init={path}/random,steps=2",
        *("--config.data.worlds=1", "--config.data.probes=1", "--config.train.rows=2"),
        *(
            "--config.data.options.answer_tokens=16",
            "--config.data.options.context=1024",
        ),  # the longest that the random model allows
    ]
    env = {name: value for name, value in os.environ.items() if name != "NPROC"}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env={**env, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    return path, done.stdout


@pytest.mark.slow
def test_the_command_writes_a_judge_and_prints_its_agreement(trained):
    path, output = trained
    card = JudgeExamplesConfig(context=1024, answer_tokens=16).card
    assert read_judge_card(path / "run" / "model") == card
    assert read_judge_card(path / "run" / "model_files") == card  # an export includes it
    rows = [line.split()[:2] for line in output.splitlines() if line.split()[0] in ("relevance", "thinking")]
    assert rows == [["relevance", "200"], ["thinking", "200"]]


@pytest.mark.slow
def test_a_training_run_can_use_the_trained_judge(trained, tmp_path, monkeypatch):
    path, _ = trained
    monkeypatch.chdir(ROOT)
    options = f"policy={path}/random,judge={path}/run/model,retriever=bm25,steps=1"
    runs = [shrink_run(config(name, options)) for name in ("r3rag_ppo", "tiresrag_grpo")]
    for run in runs:
        assert (run.judge.kind, run.judge.answer_tokens, run.judge_rollout.context) == ("model", 16, 1024)
    runs[1].recipe.use_filter = False
    assert experiment.run(runs[1], tmp_path / "run").step == 1
    (row,) = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "train/em" in row]
    assert {"reward/sufficient", "reward/thinking", "train/judge_unread"} <= set(row)
