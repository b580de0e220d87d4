"""Tests of the analyses: the runs that they need, the table and the plot."""

import csv
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from rrl.errors import UserError
from rrl.runs.launcher import load_config
from rrl.studies.analyses import analyze as analyses
from rrl.studies.analyses.catalogue import ANALYSES, TRAINING_ARMS, analysis_named
from rrl.studies.analyses.plan import AnalysisFolders
from rrl.studies.analyses.points import EvaluationOptions, evaluation_points, training_points
from rrl.studies.analyses.rows import mean_interval
from rrl.studies.reproduction.manifest import RunManifest, resolved_settings
from rrl.studies.reproduction.options import RunOptions
from rrl.studies.reproduction.plan import ARMS, PlannedRun
from tests.eval.runs import finished

ROOT = Path(__file__).parents[2]
RIGHT = {"a": "Norway", "b": "Ada Berg", "c": "1947", "d": "yes"}
POLICY = "rsearch@assets/miniwiki-policy"


@pytest.fixture(autouse=True)
def here(monkeypatch):
    monkeypatch.chdir(ROOT)


def put(out: Path, run: PlannedRun, right: str, **card) -> None:
    """Write the files of a finished run that answered these questions correctly."""
    finished(out / run.name, {name: RIGHT[name] for name in right}, **card)
    RunManifest(run.command("{out}"), resolved_settings(run), "abc", 60.0, True).save(
        out / f"{run.name}.json"
    )


def analyze(what, out, shared=None, keep=None, seeds=(0, 1, 2), run=True, command="python x", **evaluation):
    folders = AnalysisFolders(out, shared, keep)
    options = RunOptions(seeds=seeds, execute=run)
    return analyses.analyze(what, folders, options, EvaluationOptions(**evaluation), command)


# -- runs ----------------------------------------------------------------------------------------------------------


def test_every_analysis_names_the_papers_figure_or_table():
    wanted = {
        "max_steps": "R3-RAG, Figure 3",
        "top_k": "R3-RAG, Figure 4",
        "retrievers": "R3-RAG, Tables 3 and 5",
        "tokens": "R3-RAG, Table 4",
        "rewards_r3rag": "R3-RAG, Table 2",
        "rewards_tiresrag": "TIRESRAG-R1, Table 7",
        "grpo_ppo": "R-Search, Tables 4 and 7",
        "schedules": "TIRESRAG-R1, Figures 4 and 5",
    }
    assert all(source in ANALYSES[what].source for what, source in wanted.items())
    ten = [str(number) for number in range(1, 11)]
    for what in ("max_steps", "top_k"):
        points, known = evaluation_points(analysis_named(what), EvaluationOptions())
        assert [point.value for point in points] == ten and len(known) == 10


@pytest.mark.parametrize("what", [what for what in ANALYSES if not ANALYSES[what].arms])
def test_arguments_and_fields_reach_the_config_of_each_evaluation(what):
    options = EvaluationOptions(arguments=["questions=7"], fields={"rollout.rows": "8"})
    points, known = evaluation_points(analysis_named(what), options)
    assert [name for point in points for name in point.runs] == list(known)
    for run in [*known.values()][:: max(1, len(known) - 1)]:
        config = load_config(run.config, [f"{field}={value}" for field, value in run.fields.items()])
        assert config.data.questions == 7 and config.rollout.rows == 8


def test_the_varied_value_reaches_the_config():
    steps = {
        "rsearch": lambda c: c.recipe.environment.max_searches,
        "r3rag": lambda c: c.recipe.environment.max_steps,
        "r2ag": lambda c: c.recipe.environment.expansions,
        "ircot": lambda c: c.method.steps,
        "iter_retgen": lambda c: c.method.rounds,
        "flare": lambda c: c.method.sentences,
        "search_o1": lambda c: c.method.searches,
    }
    for method, found in steps.items():
        options = EvaluationOptions([f"{method}@assets/miniwiki-policy"], ["7"])
        (run,) = evaluation_points(analysis_named("max_steps"), options)[1].values()
        assert found(load_config(run.config, [f"{f}={v}" for f, v in run.fields.items()])) == 7
    (run,) = evaluation_points(analysis_named("top_k"), EvaluationOptions([POLICY], ["9"]))[1].values()
    assert load_config(run.config, []).rollout.top_k == 9
    (run,) = evaluation_points(
        analysis_named("retrievers"), EvaluationOptions([POLICY], ["exact@models/e5"])
    )[1].values()
    config = load_config(run.config, [])
    assert (config.retriever.kind, config.retriever.encoder) == ("exact", "models/e5")


def test_a_retrieval_only_recipe_gets_a_reader_and_others_get_none():
    two = ["r2ag@assets/miniwiki-policy", POLICY]
    for arguments, reader in (
        ([], "assets/miniwiki-reader"),
        (["reader=x", "dataset=y"], "x"),
        (["dataset=y"], ""),
    ):
        _, known = evaluation_points(analysis_named("tokens"), EvaluationOptions(two, arguments=arguments))
        assert [load_config(run.config, []).reader for run in known.values()] == [reader, ""]


def test_the_recipe_card_names_the_method_and_policies_of_one_method_get_distinct_labels():
    points, _ = evaluation_points(analysis_named("tokens"), EvaluationOptions(["assets/miniwiki-policy"]))
    assert [point.system for point in points] == ["rsearch"]
    policies = ["ircot@assets/miniwiki-policy", "ircot@assets/miniwiki-reader"]
    points, _ = evaluation_points(analysis_named("tokens"), EvaluationOptions(policies))
    assert [point.system for point in points] == [
        "ircot@assets/miniwiki-policy",
        "ircot@assets/miniwiki-reader",
    ]


@pytest.mark.parametrize("what", [what for what in ANALYSES if ANALYSES[what].arms])
def test_each_trained_arm_has_one_planned_run_per_seed(what):
    points, known = training_points(analysis_named(what), (0, 1))
    assert all(name in known for point in points for name in point.runs)
    assert len(points[0].runs) == 2


def test_arms_of_analyses_have_the_sizes_of_the_reproduction():
    assert {name: TRAINING_ARMS[name] for name in ARMS} == dict(ARMS)
    for name, arm in TRAINING_ARMS.items():
        if name not in ARMS:
            assert dataclasses.replace(arm, config=ARMS["tiresrag"].config) == ARMS["tiresrag"]
            config = load_config(arm.config, [])
            changed = {"fixed", "linear", "fast"} & {config.recipe.schedule}
            weights = [
                config.recipe[f"{part}_weight"] for part in ("reflect", "sufficient", "thinking", "penalty")
            ]
            assert (
                changed
                or 0 in weights
                or not config.recipe.use_difficulty
                or "plus_plus" in config.recipe.advantage
            )


# -- table and plot ------------------------------------------------------------------------------------------------------


def test_an_analysis_of_two_policies_writes_a_table_a_csv_and_a_plot(tmp_path, capsys):
    policies = [POLICY, "naive_rag@assets/miniwiki-reader"]
    _, known = evaluation_points(analysis_named("top_k"), EvaluationOptions(policies, ["1", "2", "3"]))
    put(tmp_path, known["rsearch-1"], "a", top_k=1)
    put(tmp_path, known["rsearch-2"], "abc", top_k=2, limits={"max_searches": 4, "context": 9})
    put(tmp_path, known["naive_rag-1"], "", top_k=1, corpus_sha256="e" * 64)
    analyze("top_k", tmp_path, policies=policies, values=["1", "2", "3"], run=False, command="python x")
    text = (tmp_path / "table.md").read_text()
    assert text in capsys.readouterr().out
    assert text.startswith(
        "# Passages per search: R3-RAG, Figure 4; TIRESRAG-R1, Figure 3; R2AG, Table A.6\n"
    )
    assert "Made by `python x`." in text and "- retriever: kind bm25" in text
    assert "- limits of all rows: max searches 4\n" in text
    (first,) = [line for line in text.splitlines() if line.startswith("| rsearch | 1 |")]
    (second,) = [line for line in text.splitlines() if line.startswith("| rsearch | 2 |")]
    assert "| 25.0 [0.0, 75.0] |" in first and "| – |" in first
    assert "| 75.0 [25.0, 100.0] |" in second and "| +50.0 [+0.0, +100.0] |" in second
    assert "- passages of a search differs: rsearch-1, naive_rag-1: 1; rsearch-2: 2" in text
    assert "- corpus differs: rsearch-1, rsearch-2: wiki" in text
    assert "Not measured yet:\n\n- rsearch 3\n- naive_rag 2\n- naive_rag 3\n" in text
    lines = list(csv.DictReader((tmp_path / "table.csv").open()))
    assert [(line["system"], line["value"], float(line["em"])) for line in lines] == [
        ("rsearch", "1", 0.25),
        ("rsearch", "2", 0.75),
        ("naive_rag", "1", 0.0),
    ]
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "rsearch-1.json").unlink()  # the run that the others are compared with
    analyze("top_k", tmp_path, policies=policies, values=["1", "2", "3"], run=False, command="python x")
    again = (tmp_path / "table.md").read_text()
    assert "| naive_rag | 1 |" in again and "| rsearch | 2 |" in again
    assert "| +" not in again and "| -" not in again.replace("| ---", "")


def test_an_analysis_of_arms_shows_means_values_by_seed_and_training_curves(tmp_path, capsys):
    _, known = training_points(analysis_named("grpo_ppo"), (0, 1))
    for name, right in (
        ("rsearch-0", "ab"),
        ("rsearch-1", "abcd"),
        ("rsearch_ppo-0", "a"),
        ("rsearch_ppo-1", "a"),
    ):
        put(tmp_path, known[f"{name}-eval"], right)
        (tmp_path / name).mkdir()
        lines = (f'{{"step": {at}, "reward/total": {at / 4}, "train/searches": 2.0}}\n' for at in range(3))
        (tmp_path / name / "metrics.jsonl").write_text("".join(lines))
    out = tmp_path / "out"
    analyze("grpo_ppo", out, seeds=(0, 1), shared=tmp_path, run=False)
    text = (out / "table.md").read_text()
    assert "| GRPO | 75.0 [" in text and "; 50.0, 100.0 |" in text
    (ppo,) = [line for line in text.splitlines() if line.startswith("| PPO |")]
    assert "| -50.0 [" in ppo and len(list(csv.DictReader((out / "table.csv").open()))) == 4
    assert (out / "plot.png").stat().st_size > 20_000
    assert (
        "not plotted, because the stored measurements of these runs lack them: answer reward\n"
        in capsys.readouterr().out
    )


@pytest.mark.slow
def test_the_published_measurements_yield_tables_and_plots_without_a_run(tmp_path):
    for what, rows in (("grpo_ppo", 2), ("evidence", 2), ("rewards_r3rag", 3)):
        analyze(what, tmp_path / what, shared=tmp_path / "runs", keep=ROOT / "docs/reproduction")
        text = (tmp_path / what / "table.md").read_text()
        assert "Not measured yet" not in text and (tmp_path / what / "plot.png").stat().st_size > 20_000
        assert len(list(csv.DictReader((tmp_path / what / "table.csv").open()))) == (
            3 * rows - 2 * (rows == 3)
        )
    (ppo,) = [
        line
        for line in (tmp_path / "grpo_ppo/table.md").read_text().splitlines()
        if line.startswith("| PPO |")
    ]
    assert "; 61.1, 58.2, 58.8 |" in ppo  # as docs/reproduction.md has them
    analyze(
        "rewards_tiresrag",
        tmp_path / "some",
        shared=tmp_path / "runs",
        keep=ROOT / "docs/reproduction",
        run=False,
    )
    text = (tmp_path / "some/table.md").read_text()
    assert "| w/o filter |" in text and "Not measured yet:\n\n- w/o difficulty\n" in text
    assert not (tmp_path / "runs").exists()


def test_the_interval_is_the_wider_of_questions_and_seeds():
    alike = [np.tile([0.0, 1.0], 200)] * 3  # seeds agree: the bootstrap over 400 questions
    assert 0.04 < mean_interval(alike).high - 0.5 < 0.06
    apart = [
        np.full(400, mean) for mean in (0.4, 0.5, 0.6)
    ]  # questions agree: t(0.975, 2) = 4.303 times 0.1 / sqrt(3)
    assert round(mean_interval(apart).high - 0.5, 3) == round(0.5 - mean_interval(apart).low, 3) == 0.248


# -- wrong input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "given", "words"),
    [
        ("magic", {}, "what='magic' is unknown; choose max_steps, top_k"),
        ("top_k", {"policies": [POLICY] * 2}, "one is listed twice"),
        (
            "top_k",
            {"policies": ["/none"]},
            "policy='/none': the folder has no recipe card .* give METHOD@/none",
        ),
        ("top_k", {"policies": ["rsearch@/none"]}, "policy='/none' is no Hugging Face folder"),
        ("top_k", {"values": ["x"]}, "top_k='x' is not allowed"),
        ("top_k", {"arguments": ["top_k=2"]}, "top_k=2: the analysis sets this itself"),
        ("top_k", {"fields": {"rollout.top": "2"}}, "config.rollout has no field 'top'"),
        ("max_steps", {"policies": ["direct@assets/miniwiki-reader"]}, "'direct' has no step limit"),
        ("max_steps", {"policies": ["magic@assets/miniwiki-reader"]}, "method='magic' is unknown"),
        (
            "top_k",
            {"policies": [POLICY], "arguments": ["index=http://127.0.0.1:9"]},
            "retriever.index=http://127.0.0.1:9: search failed .*Start the service",
        ),
        ("tokens", {"values": ["1"]}, "nothing is varied in 'Tokens per right answer'"),
        ("schedules", {"policies": [POLICY]}, "what='schedules' trains its own policies"),
        ("tokens", {"keep": Path("docs/reproduction")}, "leave out --keep"),
        ("schedules", {"run": False}, "no run of this analysis is finished"),
    ],
)
def test_wrong_input_is_refused_by_name_before_anything_is_written(tmp_path, what, given, words):
    with pytest.raises(UserError, match=words):
        analyze(what, tmp_path / "out", shared=tmp_path / "runs", **given)
    assert not list(tmp_path.iterdir())
