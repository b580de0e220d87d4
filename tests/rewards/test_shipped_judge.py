"""The judge in `assets/` is small and agrees with the oracle more often than the majority verdict does."""

import pathlib
import re

import numpy as np
import pytest

from rrl.models.hardware import ComputeConfig, MeshConfig
from rrl.models.weights import folder_hash
from rrl.rewards.judge_settings import JudgeSettings, judge_sections
from rrl.sft.judge_agreement import agreement, held_out_judge_examples
from rrl.sft.judge_examples import JudgeExamplesConfig

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "assets" / "miniwiki-judge"


def test_shipped_judge_is_the_documented_one_and_small():
    table = re.search(
        r"`assets/miniwiki-judge` .*`([0-9a-f]{12})` \|", (ROOT / "docs" / "training.md").read_text()
    )
    assert table is not None and folder_hash(FOLDER).startswith(table[1])
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 8 * 2**20


@pytest.mark.slow
def test_shipped_judge_beats_the_majority_verdict():
    sections = judge_sections(str(FOLDER))
    sections["judge_rollout"]["rows"] = 16
    settings = JudgeSettings.parse(sections)
    verdicts = held_out_judge_examples(25, JudgeExamplesConfig(), "dev")
    judge = settings.load(
        [verdict.prompt.question for verdict in verdicts], ComputeConfig(), MeshConfig().make()
    )
    found = agreement(judge, verdicts)
    assert set(found) == {"Relevance", "Sufficiency", "Thinking", "Correctness"}
    near, majority = (np.mean([of[name] for of in found.values()]) for name in ("near", "majority_near"))
    assert near > majority + 0.1, found
