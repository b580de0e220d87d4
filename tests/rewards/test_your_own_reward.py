"""The code of docs/your_own_reward.md runs as it stands on the page."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from rrl.data.questions import Question
from rrl.rewards.functions import RewardConfig
from rrl.runs.metrics import read_metrics
from tests.recipes.sample_episodes import trajectory
from tests.train.made import save_random_policy

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs/your_own_reward.md").read_text(encoding="utf-8")
(CODE,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
(COMMAND,) = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "brevity.py").write_text(CODE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "brevity", raising=False)
    return tmp_path


def test_the_page_takes_20_lines():
    assert len(CODE.splitlines()) <= 20


@pytest.mark.parametrize(
    ("answer", "value"),
    [("Marta Velikov", 0), ("Marta", 0), ("It was Marta Velikov", -2), ("so " * 30, -10)],
)
def test_words_beyond_the_gold_answer_cost(folder, answer, value):
    one = trajectory(question=Question("q", "Who?", ("Marta", "Marta Velikov")))
    one.answer, one.rewards = answer, {"total": 1.0}
    RewardConfig(("brevity:extra_words",), (0.05,)).load().add_to([one])
    assert one.rewards == {"extra_words": value, "total": pytest.approx(1 + 0.05 * value)}


@pytest.mark.slow
def test_the_command_of_the_page_trains(folder):
    save_random_policy(folder / "policy")
    smaller = ["policy=policy", "train.questions=2", "train.samples=2", "data.held_out_per_kind=1"]
    overrides = " ".join(f"--config.{name}" for name in smaller)
    command = COMMAND.replace("python RRL/", f"{sys.executable} {ROOT}/")
    command = command.replace("configs/rsearch_grpo.py", "configs/rsearch_grpo.py:steps=1")
    command = command.replace("PYTHONPATH=.", f"PYTHONPATH=.:{ROOT}")
    subprocess.run(
        f"{command.rstrip()} --workdir=run {overrides}", cwd=folder, shell=True, check=True, env=os.environ
    )
    (step,) = [line for line in read_metrics(folder / "run/metrics.jsonl") if "reward/extra_words" in line]
    parts = ("answer", "evidence", "format")
    expected = sum(step[f"reward/{name}"] for name in parts) + 0.05 * step["reward/extra_words"]
    assert step["reward/total"] == pytest.approx(expected, abs=1e-6)
