"""The reproduction in the small: from made-up results to verdicts, from the list of runs to what is run, and the page."""

import contextlib
import dataclasses
import gzip
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest

from rrl.errors import UserError
from rrl.eval.intervals import student
from rrl.train.launcher import load_config
from rrl.train.reproduction import queue
from rrl.train.reproduction.claims import CLAIMS, claims_named
from rrl.train.reproduction.kept import Kept
from rrl.train.reproduction.page import page
from rrl.train.reproduction.plan import Run, needed, runs
from rrl.train.reproduction.queue import record_of, shares, work
from rrl.train.reproduction.reproduce import reproduce, seeds_of
from rrl.train.reproduction.results import Evaluation, Results
from rrl.train.reproduction.verdict import FAILS, HOLDS, MISSING, UNTESTED, Evidence, judge
from tests.eval.runs import finished

ROOT = pathlib.Path(__file__).parents[2]
SEEDS = (0, 1, 2)


# -- verdicts ------------------------------------------------------------------------------------------------------------


def test_the_interval_over_seeds_is_that_of_a_t_table():
    interval = student([1.0, 2.0, 3.0])  # t(0.975, 2) = 4.303; 4.303 / sqrt(3) = 2.484
    assert (round(interval.low, 3), interval.mean, round(interval.high, 3)) == (-0.484, 2.0, 4.484)
    with pytest.raises(UserError, match="two or more"):
        student([1.0])


def seeds_that_differ_by(*means, questions=1, trained=True):
    return Evidence([0.5], [0.4], [np.full(questions, mean) for mean in means], trained)


@pytest.mark.parametrize(
    ("evidence", "word"),
    [
        (seeds_that_differ_by(2.9, 3.0, 3.1), HOLDS),
        (seeds_that_differ_by(1.0, 2.0, 3.0), UNTESTED),  # [-0.5, 4.5]
        (seeds_that_differ_by(-3.0, -2.0, -1.0), FAILS),
        (seeds_that_differ_by(-9.0, 4.0, 4.0), FAILS),  # the mean alone says so
        (seeds_that_differ_by(0.0, 0.0, 0.0), FAILS),
        (seeds_that_differ_by(3.0), UNTESTED),  # one seed
        (seeds_that_differ_by(3.0, questions=5), UNTESTED),  # questions tell nothing of seeds
        (seeds_that_differ_by(3.0, questions=5, trained=False), HOLDS),  # nothing was trained
        (seeds_that_differ_by(np.inf, 1.0, 1.0), UNTESTED),
    ],
)
def test_a_claim_holds_where_the_whole_interval_is_on_its_side_and_fails_where_the_mean_is_not(
    evidence, word
):
    assert judge(evidence).word == word


def test_an_interval_reaches_as_far_as_seeds_or_questions_say():
    answers = np.array([1.0, 1.0, 1.0, -1.0])  # seeds agree, questions do not
    alike = Evidence([0.5], [0.0], [answers, answers, answers])
    found = judge(alike)
    assert (found.word, found.difference, found.low, found.high) == (UNTESTED, 0.5, -0.5, 1.0)
    apart = judge(Evidence([0.5], [0.0], [np.full(4, mean) for mean in (0.0, 0.5, 1.0)]))
    assert round(apart.low, 3) == round(0.5 - 4.303 * 0.5 / 3**0.5, 3)


def test_what_is_no_test_of_the_claim_is_said_whatever_was_measured():
    found = judge(seeds_that_differ_by(3.0, 3.0, 3.0), "too small")
    assert (found.word, found.reason) == (UNTESTED, "too small")


# -- claims --------------------------------------------------------------------------------------------------------------


def evaluation(em=(1, 0), f1=None, tokens=(10, 10), searches=(1, 1), titles=(("A",), ("B",))):
    columns = {"em": em, "f1": f1 or em, "tokens": tokens, "searches": searches}
    return Evaluation(
        ["a", "b"],
        {name: np.array(values, float) for name, values in columns.items()},
        titles,
        (("A", "B"), ("B",)),
    )


def measured(key, evaluations=None, trainings=None):
    (claim,) = claims_named([key])
    made = evaluations or {}

    def of(name):
        return next(value for part, value in made.items() if re.fullmatch(part, name))

    return claim.measure(Results(SEEDS, of, lambda name: (trainings or {})[name]), claim.runs)


def test_seeds_stand_beside_seeds_or_beside_what_has_none():
    found = measured(
        "rl",
        {
            "rsearch-0-eval": evaluation((1, 1)),
            r"rsearch-\d-eval": evaluation((1, 0)),
            "rsearch_cold-eval": evaluation((0, 0)),
        },
    )
    assert (list(found.left), list(found.right), found.questions) == ([1.0, 0.5, 0.5], [0.0], 2)
    assert [list(values) for values in found.differences] == [[1, 1], [1, 0], [1, 0]] and found.trained
    naive = measured("naive-rag", {"naive_rag": evaluation((1, 1)), "direct": evaluation((0, 1))})
    assert [list(values) for values in naive.differences] == [[1, 0]] and not naive.trained


def test_fewer_is_better_of_tokens_and_searches():
    ours, theirs = evaluation(tokens=(10, 20), searches=(1, 1)), evaluation(tokens=(30, 20), searches=(1, 3))
    made = {r"tiresrag-\d-eval": ours, r"tiresrag_naive-\d-eval": theirs}
    assert [v.mean() for v in measured("tokens", made).differences] == [10, 10, 10]
    assert [v.mean() for v in measured("searches", made).differences] == [1, 1, 1]
    made = {
        r"r3rag-\d-eval": evaluation((1, 1), tokens=(30, 30)),
        r"r3rag_no.*": evaluation((1, 0), tokens=(20, 20)),
    }
    found = measured("tokens-r3rag", made)  # 60 tokens for two right answers against 40 for one
    assert (found.left[0], found.right[0], found.questions) == (30, 40, 0)
    assert [v.mean() for v in found.differences] == [10, 10, 10]
    made[r"r3rag_no.*"] = evaluation((0, 0))
    assert judge(measured("tokens-r3rag", made)).reason == "a run has no right answer"


def test_the_better_of_two_prompted_methods_is_what_counts():
    made = {
        "ircot": evaluation((0, 0)),
        "iter_retgen": evaluation((1, 0)),
        "naive_rag": evaluation((0, 0)),
        "rsearch_cold-eval": evaluation((1, 1)),
    }
    assert measured("iterative", made).left == measured("cold-start", made).right == [0.5]
    assert judge(measured("iterative", made), claims_named(["iterative"])[0].untestable).word == UNTESTED


def test_transfer_is_the_spread_over_retrievers_and_the_smallest_lead():
    made = {
        r"r3rag-\d-eval": evaluation((1, 1)),
        r"r3rag-\d-exact": evaluation((1, 1)),
        "r3rag-2-bm25": evaluation((1, 0)),
        r"r3rag-\d-bm25": evaluation((1, 1)),
        "naive_rag_bm25": evaluation((1, 0)),
        "naive_rag.*": evaluation((0, 0)),
    }
    spread = measured("retrievers", made)
    assert list(spread.right) == [0, 0, 0.5] and list(spread.left) == [0.03]
    assert [round(float(v[0]), 2) for v in spread.differences] == [0.03, 0.03, -0.47]
    lead = measured("retrievers-lead", made)
    assert (list(lead.left), list(lead.right)) == ([1, 1, 0.5], [0.5])


def test_a_tree_is_held_against_as_many_passages_of_a_single_search():
    made = {
        r"r2ag-\d-eval": evaluation(titles=(("A", "A", "B"), ("B",))),  # two passages, then one
        "naive_rag_top16": evaluation(titles=(("A", "C", "B"), ("B", "A"))),
    }
    found = measured("tree", made)
    assert (found.left[0], found.right[0]) == (1.0, 0.5)  # B is the third for the first question
    assert [list(values) for values in found.differences] == [[1, 0]] * 3
    made[r"r2ag-\d-eval"] = evaluation(titles=(("C", "D", "E", "A", "B"), ("B",)))
    assert (
        measured("tree", made).left[0] == 0.5
    )  # the single search found three, so that the tree's first three count


def test_collapse_is_what_the_last_quarter_lost_of_the_best():
    steady = [{"reward/answer": value} for value in (0.2, 0.4, 0.5, 0.5)]
    fallen = [{"reward/answer": value} for value in (0.2, 0.6, 0.5, 0.1)] + [{"eval/em": 0.5}]
    trainings = {f"tiresrag-{s}": steady for s in SEEDS} | {f"tiresrag_no_filter-{s}": fallen for s in SEEDS}
    found = measured("collapse", trainings=trainings)
    assert (found.left[0], round(found.right[0], 9)) == (0, 0.5)
    assert judge(found).word == HOLDS


def test_runs_that_were_asked_other_questions_are_not_held_against_each_other():
    other = dataclasses.replace(evaluation(), ids=["a", "c"])
    with pytest.raises(UserError, match="naive_rag and direct were asked different questions"):
        measured("naive-rag", {"naive_rag": evaluation(), "direct": other})
    with pytest.raises(UserError, match="and naive_rag_top16 were asked different questions"):
        measured("tree", {r"r2ag-\d-eval": evaluation(), "naive_rag_top16": other})


def test_runs_over_another_corpus_are_not_held_against_each_other():
    one, two = (dataclasses.replace(evaluation(), corpus_sha256=sha) for sha in "xy")
    closed = evaluation()  # searched nothing
    assert measured("naive-rag", {"naive_rag": one, "direct": closed}).left == [0.5]
    with pytest.raises(UserError, match="ircot and naive_rag searched different corpora; delete those"):
        measured("iterative", {"ircot": one, "iter_retgen": one, "naive_rag": two})
    with pytest.raises(UserError, match=r"and r3rag-\{seed\}-exact searched different corpora"):
        measured("retrievers", {r".*-exact": two, ".*": one})
    with pytest.raises(UserError, match="rsearch-0-eval and rsearch-1-eval searched different corpora"):
        measured("rl", {"rsearch-1-eval": two, ".*": one})


def test_a_lead_is_as_good_as_where_it_is_least_certain():
    made = {
        r"r3rag-\d-eval": evaluation((1, 1)),
        r"r3rag-\d-exact": evaluation((1, 0)),
        "r3rag-2-bm25": evaluation((0, 0)),
        r"r3rag-\d-bm25": evaluation((1, 1)),
        "naive_rag.*": evaluation((0, 0)),
    }
    # Exact leads by 50, 50, 50; BM25 by 67 in the mean, and by nothing with one seed.
    assert measured("retrievers-lead", made).left == [1, 1, 0]


def test_an_unknown_claim_is_named():
    with pytest.raises(UserError, match="only=magic is unknown; the claims are rl,"):
        claims_named(["rl", "magic"])
    for given in ([], ["0", "0"], ["a"]):
        with pytest.raises(UserError, match="whole numbers"):
            seeds_of(given)


# -- runs ----------------------------------------------------------------------------------------------------------------


def test_every_claim_has_its_runs_each_after_what_it_needs_and_all_fit_into_three_hours_on_two_cores():
    known = runs(SEEDS)
    names = list(known)
    assert all(name in known for claim in CLAIMS for name in claim.needs(SEEDS))
    assert all(names.index(need) < names.index(run.name) for run in known.values() for need in run.needs)
    assert sum(run.minutes for run in known.values()) < 2 * 180
    wanted = {run.name for run in needed([n for claim in CLAIMS for n in claim.needs(SEEDS)], known)}
    assert wanted == set(known)  # nothing is run that no claim reads
    assert [run.name for run in needed(["r2ag_cold-eval"], known)] == ["r2ag_cold", "r2ag_cold-eval"]


@pytest.mark.parametrize("smoke", [False, True])
def test_every_command_is_one_that_its_launcher_takes(smoke, tmp_path):
    for run in runs([0], smoke).values():
        _, config, _, *fields = run.command(tmp_path)
        made = load_config(config.removeprefix("--config="), [f.removeprefix("--config.") for f in fields])
        assert {
            "train": "critic" in made or "objective" in made,
            "sft": "stage" in made,
            "eval": "method" in made,
        }[run.launcher]


class Told(Run):
    """A run whose command is a line of Python."""

    def command(self, out):
        return ["-c", self.launcher.replace("{out}", str(out))]


def told(name, line, needs=()):
    return Told(name, line, "configs/eval.py", 1, needs=needs)


def write(name):
    return f"open('{{out}}/{name}', 'a').write('x')"


def test_what_is_finished_is_not_run_again_and_what_failed_or_was_broken_off_is(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    second = told("b", f"{write('b.txt')}; 1 / 0", ("a",))
    plan = [told("a", write("a.txt")), second, told("c", write("c.txt"), ("b",)), told("d", write("d.txt"))]
    found = work(plan, tmp_path, 1, lambda text: None)
    assert set(found.failed) == {"b", "c"} and "exit code 1" in found.failed["b"]
    assert "ZeroDivisionError" in (tmp_path / "b.log").read_text()
    seconds = record_of(plan[1], tmp_path).seconds
    work(plan, tmp_path, 1, lambda text: None)
    assert [(tmp_path / f"{name}.txt").exists() for name in "abcd"] == [True, True, False, True]
    assert [(tmp_path / f"{name}.txt").read_text() for name in "abd"] == ["x", "xx", "x"]
    assert record_of(plan[1], tmp_path).seconds > seconds > 0  # of both lives


def test_a_run_that_another_command_made_is_refused_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    work([told("a", write("a.txt"))], tmp_path, 1, lambda text: None)
    with pytest.raises(UserError, match=r"a was made by .*delete that folder"):
        work([told("b", write("b.txt")), told("a", write("z.txt"))], tmp_path, 1, lambda text: None)
    assert not (tmp_path / "b.txt").exists()


def test_a_run_is_of_its_settings_not_of_the_words_about_them(tmp_path):
    file = tmp_path / "config.py"
    text = "from ml_collections import ConfigDict\n\n\ndef get_config(arg=''):\n    return ConfigDict({'lr': 0.1, 'b': 2})\n"
    run = Told("a", write("a.txt"), f"{file}:seed=1", 1, {"b": 3})
    file.write_text(text)
    work([run], tmp_path, 1, lambda text: None)
    file.write_text('"""What it is for."""\n\n' + text)
    assert record_of(run, tmp_path).finished
    file.write_text(text.replace("'b': 2", "'b': 2, 'c': {'later': 1}"))
    assert record_of(run, tmp_path).finished  # a setting that came later
    file.write_text(text.replace("'lr': 0.1, ", ""))
    with pytest.raises(UserError, match=r"a was made with lr=0\.1, which is None today"):
        record_of(run, tmp_path)
    file.write_text(text.replace("0.1", "0.2"))
    with pytest.raises(UserError, match=r"a was made with lr=0\.1, which is 0\.2 today; delete that folder"):
        record_of(run, tmp_path)
    with pytest.raises(UserError, match="was made with b=3, which is 4 today"):
        record_of(dataclasses.replace(run, fields={"b": 4}), tmp_path)


def test_two_runs_go_side_by_side_each_on_its_share_of_the_cores(tmp_path, monkeypatch):
    assert sorted(core for share in shares(2) for core in share) == sorted(os.sched_getaffinity(0))
    with pytest.raises(UserError, match="jobs=0 must be 1 to"):
        shares(0)
    monkeypatch.chdir(ROOT)
    # Each waits for the other, and gives up after a minute.
    wait = (
        "import pathlib, time; {mine}; end = time.monotonic() + 60\n"
        "while not pathlib.Path('{{out}}/{other}').exists():\n    time.sleep(0.01); assert time.monotonic() < end"
    )
    plan = [
        told(mine, wait.format(mine=write(mine + ".txt"), other=other + ".txt"))
        for mine, other in (("a", "b"), ("b", "a"))
    ]
    assert not work(plan, tmp_path, 2, lambda text: None).failed


def test_a_signal_ends_the_runs_and_the_same_call_goes_on(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    line = "import pathlib, time; f = pathlib.Path('{out}/there'); new = not f.exists(); f.touch()\ntime.sleep(60 * new)"
    plan = [told("a", line)]

    def stop(_):
        while not (tmp_path / "there").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), queue.signal.SIGTERM)

    assert work(plan, tmp_path, 1, stop).stopped
    record = record_of(plan[0], tmp_path)
    assert not record.finished
    assert not work(plan, tmp_path, 1, lambda text: None).stopped
    assert record_of(plan[0], tmp_path).finished


@pytest.mark.slow
def test_a_run_that_outlives_its_killed_parent_keeps_a_second_one_out(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    there = tmp_path / "pid"
    line = "import os, pathlib, time; file = pathlib.Path('{out}/pid'); new = not file.exists()\n"
    line += "file.write_text(str(os.getpid())); time.sleep(60 * new)"
    plan = [told("a", line)]
    script = (
        "import pathlib\nfrom rrl.train.reproduction import plan, queue\n"
        f"class Told(plan.Run):\n    def command(self, out): return ['-c', {line!r}.replace('{{out}}', str(out))]\n"
        f"queue.work([Told('a', 'train', {plan[0].config!r}, 1)], pathlib.Path({str(tmp_path)!r}), 1)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": str(ROOT)})
    while not (there.exists() and there.read_text()):
        assert parent.poll() is None
        time.sleep(0.01)
    parent.kill()
    parent.wait()
    with pytest.raises(UserError, match="another process runs there"):
        work(plan, tmp_path, 1, lambda text: None)
    os.kill(int(there.read_text()), queue.signal.SIGKILL)
    for _ in range(1000):
        with contextlib.suppress(UserError):
            assert not work(plan, tmp_path, 1, lambda text: None).failed
            break
        time.sleep(0.01)
    assert record_of(plan[0], tmp_path).finished


# -- the page ------------------------------------------------------------------------------------------------------------


ANSWERS = {"a": "Norway", "b": "Ada Berg", "c": "1947", "d": "yes"}


def measured_in(out, name, answers):
    """As if the run had been done."""
    finished(out / name, answers)
    recorded(runs(SEEDS)[name], out)


def recorded(run, out, seconds=90.0):
    out.mkdir(exist_ok=True)
    queue.Record(run.command("{out}"), queue.settings_of(run), "abc", seconds, True).save(
        out / f"{run.name}.json"
    )


def row_of(file, key):
    (row,) = [line for line in file.read_text().splitlines() if line.startswith(f"| {key} |")]
    return row


def test_the_page_tells_what_was_measured_and_lists_what_was_not(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    known = runs(SEEDS)
    measured_in(tmp_path, "naive_rag", ANSWERS)
    measured_in(tmp_path, "direct", {"d": "yes"})
    file = tmp_path / "page.md"
    reproduce(tmp_path, file, run=False)
    text = file.read_text()
    assert "| 100.0 against 25.0 | +75.0 [+25.0, +100.0] | 4 | **holds** |" in row_of(file, "naive-rag")
    assert row_of(file, "process").endswith(f"| – | – | – | {MISSING} |")
    assert "- process: `python launch/reproduce.py --only=process` (6 runs)" in text
    assert f"1 holds; {len(CLAIMS) - 1} {MISSING}." in text
    assert f"2 of {len(known)} runs, 3 minutes in all" in text and "Commit abc." in text
    assert "- passages of a search: 2\n" in text and "python 3" in text  # of the result cards
    kept = Kept(tmp_path / "kept", known)
    assert "smoke" not in text
    assert "smoke run" in page(known, tmp_path, kept, SEEDS, "python x", smoke=True)
    other = tmp_path / "other"
    measured_in(other, "naive_rag", {"d": "yes"})
    measured_in(other, "direct", ANSWERS)
    reproduce(other, file, run=False)
    assert row_of(file, "naive-rag").endswith(
        f"| 25.0 against 100.0 | -75.0 [-100.0, -25.0] | 4 | **{FAILS}** |"
    )


def test_what_is_kept_makes_the_page_without_its_runs_and_is_not_run_again(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    out, keep, file = tmp_path / "out", tmp_path / "kept", tmp_path / "page.md"
    measured_in(out, "naive_rag", ANSWERS)
    measured_in(out, "direct", {"d": "yes"})
    reproduce(out, file, keep=keep, run=False, command="x")
    first = file.read_text()
    files = {each.name: each.read_bytes() for each in keep.iterdir()}
    assert sorted(files) == ["direct.json.gz", "naive_rag.json.gz"]
    reproduce(out, file, keep=keep, run=False, command="x")
    assert {each.name: each.read_bytes() for each in keep.iterdir()} == files

    shutil.rmtree(out)
    assert not reproduce(out, file, keep=keep, only=["naive-rag"], command="x").failed  # runs nothing
    assert file.read_text() == first and not out.exists()
    capsys.readouterr()
    reproduce(out, file, keep=keep, only=["naive-rag", "iterative"], listed=True)
    assert [line.split()[3] for line in capsys.readouterr().out.splitlines()[:-1]] == ["iter_retgen", "ircot"]

    measured_in(out, "direct", ANSWERS)  # done once more: the newer one counts
    (out / "direct.json").write_text((out / "direct.json").read_text().replace("90.0", "30.0"))
    reproduce(out, file, keep=keep, run=False, command="x")
    assert "| 100.0 against 100.0 |" in row_of(file, "naive-rag") and "2 minutes in all" in file.read_text()


def test_training_is_kept_as_far_as_the_claims_read_it(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    plan = {"a": Run("a", "train", "configs/rsearch_grpo.py", 1)}
    recorded(plan["a"], tmp_path)
    lines = [{"step": step, "reward/answer": 0.1 * step, "other": 1.0} for step in (1, 2)]
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    Kept(tmp_path / "kept", plan).take(tmp_path)
    found = Kept(tmp_path / "kept", plan).results((0,)).training("a")
    assert [dict(line) for line in found] == [{"step": s, "reward/answer": 0.1 * s} for s in (1, 2)]


def trained_and_evaluated(out, seconds=90.0):
    """A cold start and two evaluations of it, as if they had been done."""
    cold = Run("cold", "sft", "configs/miniwiki_cold_start.py", 1)
    looks = [Run(name, "eval", "configs/eval.py", 1, needs=("cold",)) for name in ("one", "two")]
    recorded(cold, out, seconds)
    for look in looks:
        finished(out / look.name, ANSWERS, model=f"{out}/cold/model", command=f"python x --out={out}")
        recorded(look, out)
    return {run.name: run for run in (cold, *looks)}


def test_what_started_from_a_model_that_was_made_anew_counts_no_longer(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    out, folder = tmp_path / "out", tmp_path / "kept"
    plan = trained_and_evaluated(out)
    Kept(folder, plan).take(out)
    assert not Kept(folder, plan).lacking(["one", "two"], tmp_path / "nothing")
    card = Kept(folder, plan).entries["one"].card
    assert (card.model, card.command) == ("{out}/cold/model", "python x --out={out}")
    (folder / "two.json.gz").unlink()
    lacking = Kept(folder, plan).lacking
    assert [run.name for run in lacking(["one", "two"], out)] == ["cold", "two"]  # its model is still there
    assert [run.name for run in lacking(["one", "two"], tmp_path / "nothing")] == ["cold", "one", "two"]

    again = tmp_path / "again"
    trained_and_evaluated(again, seconds=91.0)
    (again / "one.json").unlink()
    kept = Kept(folder, plan)
    kept.take(again)
    for each in (kept, Kept(folder, plan)):
        assert set(each.entries) == {"cold", "two"}
        assert each.outdated == {"one": "started from cold, which was done anew since"}


def test_what_other_settings_made_is_not_used(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    out, keep, file = tmp_path / "out", tmp_path / "kept", tmp_path / "page.md"
    measured_in(out, "naive_rag", ANSWERS)
    measured_in(out, "direct", {"d": "yes"})
    reproduce(out, file, keep=keep, run=False)
    changed = {
        "naive_rag": dataclasses.replace(runs(SEEDS)["naive_rag"], fields={"prompted.most_passages": 3})
    }
    assert "naive_rag" in Kept(keep, changed).outdated and not Kept(keep, changed).entries
    monkeypatch.setattr("rrl.train.reproduction.reproduce.runs", lambda *_: runs(SEEDS) | changed)
    reproduce(out, file, keep=keep, run=False)  # neither what is kept nor what lies in the folder
    assert "naive_rag was made by launch/eval.py" in capsys.readouterr().err
    assert MISSING in row_of(file, "naive-rag")


def test_the_published_page_is_that_of_the_published_results(monkeypatch):
    """Settings that changed since make it differ: launch/reproduce.py --norun --keep=docs/reproduction
    --page=docs/reproduction.md writes it anew, and what is measured no longer says so."""
    monkeypatch.chdir(ROOT)
    known = runs(SEEDS)
    kept = Kept(ROOT / "docs" / "reproduction", known)
    command = "python launch/reproduce.py --keep=docs/reproduction"
    made = page(known, pathlib.Path("runs/reproduce"), kept, SEEDS, command)
    assert made == (ROOT / "docs" / "reproduction.md").read_text()


def test_where_nothing_is_finished_no_page_is_touched(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    file = tmp_path / "page.md"
    file.write_text("published")
    with pytest.raises(UserError, match=r"nothing is finished in .*out, and nothing kept in .*none"):
        reproduce(tmp_path / "out", file, keep=tmp_path / "none", run=False)
    assert file.read_text() == "published"
    with pytest.raises(UserError, match="is a file; give a folder"):
        reproduce(tmp_path / "out", file, keep=file, run=False)


def test_whatever_is_damaged_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    measured_in(tmp_path, "direct", ANSWERS)
    known = {"direct": runs(SEEDS)["direct"]}
    Kept(tmp_path / "kept", known).take(tmp_path)
    file = tmp_path / "kept" / "direct.json.gz"
    whole = file.read_bytes()
    told = json.loads(gzip.decompress(whole))
    flipped = whole[:40] + bytes(byte ^ 255 for byte in whole[40:60]) + whole[60:]
    others = [
        {},
        [],
        told | {"record": {"made": 1}},
        told | {"evaluation": {}},
        told | {"card": {"method": ""}},
    ]
    for content in (
        b"x",
        whole[:50],
        flipped,
        *(gzip.compress(json.dumps(each).encode()) for each in others),
    ):
        file.write_bytes(content)
        with pytest.raises(UserError, match=r"direct\.json\.gz is damaged .*delete it"):
            Kept(tmp_path / "kept", known)


def start(*flags):
    return subprocess.run(
        [sys.executable, "launch/reproduce.py", *flags],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


def test_wrong_input_is_one_line_and_leaves_nothing(tmp_path):
    done = start(f"--out={tmp_path / 'out'}", f"--page={tmp_path / 'page.md'}", "--only=magic")
    assert done.returncode == 2 and "error: only=magic is unknown" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_two_claims_go_from_commands_to_the_page_and_are_not_run_again(tmp_path):
    flags = ("--smoke", "--only=naive-rag,rl", "--seeds=0", f"--out={tmp_path / 'out'}")
    done = start(*flags)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "out" / "reproduction.md").read_text()
    verdicts = dict(re.findall(r"^\| ([\w-]+) \|.*\| (.*) \|$", text, re.MULTILINE))
    assert verdicts["rl"] != MISSING and verdicts["naive-rag"] != MISSING and verdicts["tree"] == MISSING
    assert "This is a smoke run" in text
    assert json.loads((tmp_path / "out" / "rsearch-0.json").read_text())["finished"]
    again = start(*flags)
    assert again.returncode == 0 and "..." not in again.stderr
