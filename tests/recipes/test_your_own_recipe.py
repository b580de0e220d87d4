"""The code of docs/your_own_recipe.md runs as it stands on the page: a fifth paper changes no file of rrl."""

import importlib
import os
import pathlib
import re
import subprocess
import sys

import pytest

from rrl.data.trajectory import POLICY
from rrl.miniwiki import generate
from rrl.miniwiki.experts import demonstrate
from rrl.recipes.catalogue import make_recipe
from rrl.runs.metrics import read_metrics
from tests.recipes.sample_episodes import QUESTION, as_segments, scored
from tests.train.made import save_random_policy

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs/your_own_recipe.md").read_text(encoding="utf-8")
CODE, CONFIG = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    (tmp_path / "autorefine.py").write_text(CODE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "autorefine", raising=False)
    importlib.invalidate_caches()
    return make_recipe("autorefine:AutoRefine")


def test_a_fifth_paper_takes_80_lines_and_a_config_of_40():
    assert len(CODE.splitlines()) <= 80 and len(CONFIG.splitlines()) <= 40


@pytest.mark.parametrize(
    ("refined", "answer", "rewards"),
    [
        ("Marta Velikov directed it.", "Marta Velikov", (1.0, 0.0, 1.0)),
        ("Marta Velikov directed it.", "Edda Tolvik", (0.0, 0.1, 0.1)),
        ("Nothing is known.", "Edda Tolvik", (0.0, 0.0, 0.0)),
        ("Marta Velikov directed it.", "Marta", (2 / 3, 0.0, 2 / 3)),
    ],
)
def test_a_refinement_with_the_gold_answer_is_rewarded_if_the_answer_earns_nothing(
    recipe, refined, answer, rewards
):
    text = f"<refine>{refined}</refine>\n<answer>{answer}</answer>"
    episode = scored(recipe, (POLICY, "<search> Silver Harbour </search>"), (POLICY, text))
    found = tuple(episode.rewards[name] for name in ("answer", "refine", "total"))
    assert found == pytest.approx(rewards) and episode.evidence == refined
    assert QUESTION.text in recipe.prompt(QUESTION)


def test_the_expert_of_the_page_earns_the_full_reward(recipe):
    wiki = generate("test", 0, 200)
    for kind in ("one_hop", "three_hop", "comparison"):
        (item,) = wiki.questions(kind, 1, seed=0)
        segments = as_segments(demonstrate(recipe, item, lambda query: wiki.passages[:2]))
        assert scored(recipe, *segments, question=item.question).rewards["total"] == 1


@pytest.mark.slow
def test_the_config_of_the_page_trains(recipe, tmp_path):
    save_random_policy(tmp_path / "policy")
    (tmp_path / "autorefine_grpo.py").write_text(CONFIG, encoding="utf-8")
    command = [
        sys.executable,
        str(ROOT / "launch/train.py"),
        "--config=autorefine_grpo.py:steps=1",
        "--workdir=run",
    ]
    smaller = ["policy=policy", "train.questions=2", "train.samples=2", "data.held_out_per_kind=1"]
    command += [f"--config.{name}" for name in smaller]
    subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": f".:{ROOT}"}, check=True)
    steps = [line for line in read_metrics(tmp_path / "run/metrics.jsonl") if "reward/refine" in line]
    assert len(steps) == 1
