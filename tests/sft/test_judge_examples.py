"""The judge's cases: what it is trained on is what it will be asked, with the oracle's verdict, in worlds of their own."""

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
from rrl.sft import stages
from rrl.sft.judge_agreement import held_out_judge_examples
from rrl.sft.judge_examples import (
    PROMPT_KINDS,
    JudgeExamplesConfig,
    make_judge_examples,
    tokenize_judge_examples,
)
from rrl.sft.loop import SFTConfig
from rrl.text.chat import fitting_ids
from rrl.train import experiment
from tests.train.made import ROOT, config, save_random_policy, shrink_run

WIKI = generate("train", 3, 200)
OPTIONS = JudgeExamplesConfig()
FOUND = list(make_judge_examples(WIKI, 0, 12, OPTIONS))


def test_an_answer_reads_as_the_oracles_verdict():
    scores = Oracle().grade([verdict.prompt for verdict in FOUND])
    assert [verdict.score for verdict in FOUND] == scores
    assert [verdict.prompt.parse(verdict.answer) for verdict in FOUND] == scores


def test_every_kind_of_case_comes_about_every_question_with_verdicts_that_differ():
    for kind in PROMPT_KINDS:
        scores = [verdict.score for verdict in FOUND if type(verdict.prompt) is kind]
        assert len(scores) == 60
        assert len(set(scores)) >= (2 if kind in (Sufficiency, Correctness) else 5)
        _, counts = np.unique(scores, return_counts=True)
        assert counts.max() < 0.75 * len(scores)


def test_reasons_are_what_the_verdict_follows_from():
    for verdict in FOUND:
        case, answer = verdict.prompt, verdict.answer
        if isinstance(case, Sufficiency):
            assert ("unknown" in answer) == (verdict.score == 0)
            stated = re.findall(r"The [\w ]+? of (.+?) is (?!unknown)", answer)
            assert set(stated) <= set(case.transcript.titles)
        elif isinstance(case, Relevance):
            assert ("nothing" in answer) == (verdict.score == 0)
            shown = {passage.title for passage in case.passages}
            assert all(
                (title in answer) == (title in shown)
                for title in case.question.gold
                if title not in answer.partition(" : ")[0]
            )
        elif isinstance(case, Thinking):
            assert ("unknown" in answer or "nothing" not in answer) == (
                verdict.score < 1
            ) or verdict.score == 1
        elif isinstance(case, Correctness):
            assert f"{gold_text(case.question)} : {case.predicted}" in answer


def test_an_example_is_the_judges_prompt_and_its_answer():
    tokenizer = load_tokenizer("assets/miniwiki-tokenizer")
    for verdict, example in zip(
        FOUND, tokenize_judge_examples(iter(FOUND), tokenizer, OPTIONS.card), strict=True
    ):
        prompt = fitting_ids(tokenizer, OPTIONS.card.prompt_for(verdict.prompt), 10_000)  # nothing is cut
        assert len(example) <= OPTIONS.context
        np.testing.assert_array_equal(example.tokens[~example.loss], prompt)
        said = example.tokens[example.loss]
        assert len(said) <= OPTIONS.answer_tokens and said[-1] == tokenizer.eos_token_id
        text = tokenizer.decode(said, skip_special_tokens=True)
        assert verdict.prompt.parse(text.strip()) == verdict.score


def test_the_same_arguments_give_the_same_cases_and_others_give_others():
    again = list(make_judge_examples(WIKI, 0, 12, OPTIONS))
    assert again == FOUND
    assert [verdict.answer for verdict in make_judge_examples(WIKI, 1, 12, OPTIONS)] != [
        v.answer for v in FOUND
    ]


def test_held_out_cases_share_no_name_with_training(monkeypatch):
    made = []

    def spy(split, seed, passages, worlds=1):
        made.append((split, seed))
        return generate(split, seed, passages, worlds)

    monkeypatch.setattr(stages, "generate", spy)
    settings = SFTConfig(steps=1, optim=OptimConfig(total_steps=1), rows=2, row_length=768)
    data = {"worlds": 1, "steps_per_block": 2, "probes": 5, "options": {}}
    tokenizer = load_tokenizer("assets/miniwiki-tokenizer")
    source, probes = stages.STAGES["verdicts"](data, settings, tokenizer, pathlib.Path("unused"))
    assert {split for split, _ in made} == {"dev"}
    assert set(probes) == {kind.__name__.lower() for kind in PROMPT_KINDS} and all(probes.values())
    made.clear()
    text = tokenizer.decode(source.batch(0).tokens.reshape(-1))
    ((split, seed),) = made
    assert split == "train" and seed >= 1000
    held_out = {
        passage.title
        for verdict in held_out_judge_examples(10, OPTIONS)
        if isinstance(verdict.prompt, Relevance)
        for passage in verdict.prompt.passages
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
def test_a_wrong_field_is_named(fields, message):
    with pytest.raises(UserError, match=message):
        JudgeExamplesConfig(**fields)


def test_the_config_holds_every_option():
    filled = config("miniwiki_judge")
    assert JudgeExamplesConfig(**filled.data.options) == OPTIONS and len(filled.data.options) == 5
    assert OPTIONS.card.cases == ("Relevance", "Sufficiency", "Thinking", "Correctness")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two steps of the command itself, from a random model, and what it printed."""
    path = tmp_path_factory.mktemp("judge")
    save_random_policy(path / "random")
    command = [
        *(sys.executable, "launch/sft.py", f"--workdir={path}/run"),
        f"--config=configs/miniwiki_judge.py:init={path}/random,steps=2",
        *("--config.data.worlds=1", "--config.data.probes=1", "--config.train.rows=2"),
        *("--config.data.options.answer_tokens=16", "--config.data.options.context=1024"),  # its longest
    ]
    env = {name: value for name, value in os.environ.items() if name != "NPROC"}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env={**env, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    return path, done.stdout


@pytest.mark.slow
def test_the_command_writes_a_judge_and_tells_its_agreement(trained):
    path, said = trained
    card = JudgeExamplesConfig(context=1024, answer_tokens=16).card
    assert read_judge_card(path / "run" / "model") == card
    assert read_judge_card(path / "run" / "model_files") == card  # an export has it too
    rows = [line.split()[:2] for line in said.splitlines() if line.split()[0] in ("relevance", "thinking")]
    assert rows == [["relevance", "200"], ["thinking", "200"]]


@pytest.mark.slow
def test_a_run_takes_it_as_its_judge(trained, tmp_path, monkeypatch):
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
