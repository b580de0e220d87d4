"""Curves of runs and arms are plotted with labels, captions and notes on missing metrics."""

import json

import numpy as np
import pytest

from rrl.errors import UserError
from rrl.recipes.base import Curves
from rrl.recipes.catalogue import RECIPES
from rrl.report.curves import plot_spread, plot_training, series, smooth


def run(steps=40, seed=0, slope=1.0):
    rng = np.random.default_rng(seed)
    rows = []
    for step in range(1, steps + 1):
        noise = rng.normal(0, 0.05, 9)
        done = slope * step / steps
        rows.append(
            {
                "step": step,
                "time/minutes": step / 8,
                "reward/total": 0.9 + 0.5 * done + noise[0],
                "reward/answer": 0.4 + 0.2 * done + noise[1],
                "reward/evidence": 0.3 + 0.2 * done + noise[2],
                "reward/format": 0.3 + 0.1 * done + noise[3] / 5,
                "train/em": 0.35 + 0.15 * done + noise[4],
                "train/f1": 0.4 + 0.15 * done + noise[5],
                "train/searches": 1.8 + 0.4 * done + noise[6],
                "train/entropy": 0.4 - 0.2 * done + noise[7] / 5,
                "train/kl": 0.02 * done + abs(noise[8]) / 50,
            }
        )
    for step in (0, steps // 2, steps):
        held_out = {"step": step, "time/minutes": step / 8, "eval/em": 0.46 + 0.1 * slope * step / steps}
        rows.append(held_out | {"eval/f1": held_out["eval/em"] + 0.04})
    return rows


def is_png(path):
    return path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_run_can_be_plotted_from_rows_and_from_a_file(tmp_path):
    plot_training(run(), tmp_path / "deep" / "rows.png", "R-Search on miniwiki")
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, run())))
    plot_training(tmp_path / "metrics.jsonl", tmp_path / "file.png", "R-Search on miniwiki")
    assert is_png(tmp_path / "file.png")
    assert (tmp_path / "file.png").read_bytes() == (tmp_path / "deep" / "rows.png").read_bytes()


@pytest.mark.parametrize(("temperature", "words"), [(0.0, "greedy decoding"), (0.1, "temperature 0.1")])
def test_held_out_labels_name_the_decoding(tmp_path, monkeypatch, temperature, words):
    drawn = []
    monkeypatch.setattr("rrl.report.curves.save_figure", lambda figure, _: drawn.append(figure))
    plot_training(run(), tmp_path / "x.png", temperature=temperature)
    labels = [line.get_label() for axis in drawn[0].axes for line in axis.lines]
    assert labels.count(f"held out, {words}") == 2


def figure_of(monkeypatch, rows, **options):
    drawn = []
    monkeypatch.setattr("rrl.report.curves.save_figure", lambda figure, _: drawn.append(figure))
    plot_training(rows, "x.png", **options)
    return drawn[0]


def words_in(figure):
    """Return the labels of each panel's legend, by the panel's title."""
    return {axis.get_title("left"): axis.get_legend_handles_labels()[1] for axis in figure.axes}


@pytest.mark.parametrize("name", RECIPES)
def test_each_recipe_labels_its_rewards_and_metrics(monkeypatch, name):
    recipe = RECIPES[name]()
    curves = recipe.curves
    paid = {f"reward/{name}": 0.5 for name in ("total", *curves.rewards)}
    measured = {f"train/{name}": 0.5 for name in curves.metrics}
    words = words_in(figure_of(monkeypatch, [{"step": 1} | paid | measured], curves=curves))
    assert words["reward"] == ["total", *curves.rewards.values()]
    assert set(curves.metrics.values()) < set(words)


def test_undeclared_rewards_are_plotted_by_name_without_equations(monkeypatch):
    rows = [{"step": 1, "reward/total": 1.0, "reward/brief": 0.5, "reward/answer": 0.5}]
    assert words_in(figure_of(monkeypatch, rows, curves=Curves()))["reward"] == [
        "total",
        "answer",
        "brief",
    ]


def test_only_a_run_with_a_critic_has_its_panel(monkeypatch):
    without, critic = run(2), [line | {"critic/explained_variance": 0.5} for line in run(2)]
    assert not any("critic" in title for title in words_in(figure_of(monkeypatch, without)))
    assert any("critic" in title for title in words_in(figure_of(monkeypatch, critic)))


def test_legends_cover_no_line_and_the_caption_explains_pale_lines(monkeypatch):
    figure = figure_of(monkeypatch, run())
    figure.draw_without_rendering()
    for axis in figure.axes:
        if legend := axis.get_legend():
            assert not legend.get_window_extent().overlaps(axis.get_window_extent())
    assert "mean over 3 steps" in figure.get_supxlabel()
    assert not figure_of(monkeypatch, run(5)).get_supxlabel()


def test_a_short_run_has_no_ticks_between_steps(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("rrl.report.curves.save_figure", lambda figure, _: drawn.append(figure))
    plot_training(run(steps=2), tmp_path / "run.png")
    ticks = [tick for axis in drawn[0].axes for tick in axis.get_xticks()]
    assert ticks and all(tick == int(tick) for tick in ticks)


def test_a_run_of_one_step_with_missing_metrics_can_be_plotted(tmp_path):
    plot_training([{"step": 1, "reward/total": None, "train/em": 0.5}], tmp_path / "short.png")
    assert is_png(tmp_path / "short.png")


def test_arms_of_different_lengths_can_be_plotted_over_minutes(tmp_path):
    arms = {
        "GRPO": [run(seed=seed) for seed in range(4)],
        "SFT continued": [run(90, 9, 0.1), run(80, 8, 0.0)],
    }
    plot_spread(arms, tmp_path / "spread.png", x="time/minutes")
    assert is_png(tmp_path / "spread.png")


def test_series_drops_missing_values_and_sorts():
    rows = [
        {"step": 2, "a": 1.0},
        {"step": 1, "a": 3.0},
        {"step": 3, "a": None},
        {"step": 4, "a": float("nan")},
        {"step": 5},
    ]
    steps, values = series(rows, "a")
    assert steps.tolist() == [1, 2]
    assert values.tolist() == [3, 1]


def test_smoothing_preserves_constants_and_averages_a_window():
    np.testing.assert_allclose(smooth(np.full(9, 2.0), 4), 2.0)
    np.testing.assert_allclose(smooth(np.arange(9.0), 3)[4], 4.0)


@pytest.mark.parametrize("source", ["nowhere/metrics.jsonl", []])
def test_a_run_without_steps_is_rejected(tmp_path, source):
    with pytest.raises(UserError, match=r"nowhere|no step"):
        plot_training(source, tmp_path / "x.png")
    assert not list(tmp_path.iterdir())


def test_an_arm_without_runs_is_rejected(tmp_path):
    with pytest.raises(UserError, match="permuted"):
        plot_spread({"permuted": []}, tmp_path / "x.png")


def spread_of(monkeypatch, seeds, steps, arms=1):
    """Return the figure that `plot_spread` would write."""
    drawn = []
    monkeypatch.setattr("rrl.report.curves.save_figure", lambda figure, _: drawn.append(figure))
    plot_spread(
        {f"arm {at}": [run(steps, seed=seed) for seed in range(seeds)] for at in range(arms)}, "spread.png"
    )
    return drawn[0]


@pytest.mark.parametrize(
    ("seeds", "steps", "words"),
    [
        (
            3,
            40,
            "Lines: mean over seeds and over 3 steps, centred. Bands: from the lowest seed to the highest.",
        ),
        (3, 10, "Lines: mean over seeds. Bands: from the lowest seed to the highest."),
        (1, 40, "Lines: mean over 3 steps, centred."),
        (1, 10, ""),
    ],
)
def test_the_caption_explains_bands_and_smoothed_lines(monkeypatch, seeds, steps, words):
    assert spread_of(monkeypatch, seeds, steps).get_supxlabel() == words


def test_the_caption_of_many_arms_does_not_overlap_their_legend(monkeypatch):
    figure = spread_of(monkeypatch, 3, 40, arms=6)
    (legend,) = figure.legends
    assert legend.get_title().get_text().startswith("Lines: mean over seeds and over 3 steps")
    figure.draw_without_rendering()
    box = legend.get_window_extent()
    assert not any(axis.get_tightbbox().overlaps(box) for axis in figure.axes)
    assert not figure.get_supxlabel()
