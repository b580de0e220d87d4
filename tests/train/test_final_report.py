"""The trajectories of a run's report."""

import types

import numpy as np

from rrl.report.article import HELD_OUT, TRAINING, UNUSED
from rrl.train.final_report import page_trajectories
from tests.eval.fakes import many


def test_page_trajectories_are_labelled_as_held_out_training_or_unused():
    held_out, sampled = many(2), many(8)
    outcome = types.SimpleNamespace(
        last_trajectories=sampled, left_out=np.arange(8) < 4, eval_trajectories=held_out
    )
    shown = page_trajectories(outcome)
    assert [found for found, _ in shown] == held_out + sampled
    assert [found for _, found in shown] == [HELD_OUT] * 2 + [UNUSED] * 4 + [TRAINING] * 4


def test_a_run_without_training_or_evaluation_has_no_page_trajectories():
    outcome = types.SimpleNamespace(last_trajectories=[], left_out=np.zeros(0, bool), eval_trajectories=[])
    assert page_trajectories(outcome) == []
