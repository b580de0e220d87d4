"""Cold start by rejection sampling, end to end with a scripted teacher, and training on its pairs."""

import json
import os
import shutil
import signal

import pytest

from rrl.errors import UserError
from rrl.files import SaveError, exclusive_lock
from rrl.recipes.card import read_card
from rrl.runs.workdir import refuse_other_config
from rrl.sft import cold_start, stages
from rrl.sft.cold_start_pairs import ColdStartReport
from rrl.sft.cold_start_settings import ColdStartSettings
from rrl.train import experiment
from tests.sft.cold_start_runs import config, write_pairs
from tests.train.made import ROOT, save_random_policy, shrink_cold_start


def settings(service, cache, more="", **sampling):
    made = config(f"model={service.url},model_name=m,retriever=bm25,prompt=paper{more}")
    made.data.update({"train_worlds": 1, "train_per_kind": 2})
    made.sampling.update({"block": 4, "questions": 10, **sampling})
    made.endpoint.update({"cache": str(cache), "retries": 0, "time_out": 5.0})
    return made


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_correct_and_well_formed_trajectories_are_accepted_and_others_counted_by_reason(
    service, tmp_path, capsys
):
    made = settings(service, tmp_path / "cache", temperatures=(0.1, 0.1, 0.4, 0.7, 1.0), keep=0)
    report = cold_start.run(made, tmp_path / "run")
    steps = sum(len(item.plan.hops) + 1 for item in service.plans.values())
    assert report == ColdStartReport(
        questions=10,
        trajectories=50,
        kept=10,
        answered=10,
        pairs=steps,
        fell={"duplicate": 10, "incorrect": 10, "malformed": 10, "unanswered": 10},
        by_temperature={"0.1": (10, 20), "0.4": (0, 10), "0.7": (0, 10), "1.0": (0, 10)},
    )
    assert "10 accepted (20.0 %), of 10 questions" in capsys.readouterr().out
    assert json.loads((tmp_path / "run" / "report.json").read_text())["fell"]["malformed"] == 10
    pairs = lines(tmp_path / "run" / "pairs.jsonl")
    assert len(pairs) == steps
    first = pairs[0]
    assert first["step"] == 1 and first["input"].startswith("The question: ")  # and no figure
    assert first["output"].startswith("Step 1:\nThe problem analysis: Go on.\nThe retrieval query: ")
    later = pairs[1]
    assert later["input"].startswith(
        f"{first['input']}\n{first['output']}\nThe retrieval documents: (Title: "
    )
    records = [r for file in sorted((tmp_path / "run" / "blocks").iterdir()) for r in lines(file)]
    assert len(records) == 50 and all(record["said"] for record in records)


def test_cut_steps_are_malformed_and_refusals_and_unparsed_judgements_are_counted(
    service, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(service, "cut", lambda said: "The final answer:" in said)
    report = cold_start.run(settings(service, tmp_path / "a", temperatures=(0.1,)), tmp_path / "cut")
    assert report.fell == {"malformed": 10} and report.unread == 0
    assert "could not be parsed" not in capsys.readouterr().out

    # A refused request ends its trajectory.
    monkeypatch.setattr(service, "cut", lambda said: False)
    monkeypatch.setattr(service, "refused", lambda body: "Previous Steps:" in body["messages"][-1]["content"])
    report = cold_start.run(settings(service, tmp_path / "c", temperatures=(0.1,)), tmp_path / "refused")
    assert report.fell == {"refused": 10}

    monkeypatch.setattr(service, "refused", lambda body: False)
    judge = f",judge={service.url},judge_model=j"
    made = settings(service, tmp_path / "b", judge, temperatures=(0.4,), questions=2)
    made.judge_endpoint.update({"cache": str(tmp_path / "b"), "retries": 0, "time_out": 5.0})
    report = cold_start.run(made, tmp_path / "unread")
    assert report.fell == {"incorrect": 2} and report.unread == 2
    assert "2 answers of the judge could not be parsed" in capsys.readouterr().out


def test_a_run_interrupted_by_its_service_continues_to_the_result_of_an_uninterrupted_run(service, tmp_path):
    whole = cold_start.run(settings(service, tmp_path / "a"), tmp_path / "whole")
    service.asked.clear()

    def break_down(text):
        if service.asked.total() > 60:
            raise ConnectionError

    service.before = break_down
    made = settings(service, tmp_path / "b")
    with pytest.raises(OSError, match=r"127\.0\.0\.1"):
        cold_start.run(made, tmp_path / "broken")
    done = len(list((tmp_path / "broken" / "blocks").iterdir()))
    assert 0 < done < 3 and not (tmp_path / "broken" / "pairs.jsonl").exists()
    before, service.before = service.asked.copy(), lambda text: None
    service.asked.clear()
    assert cold_start.run(made, tmp_path / "broken") == whole
    for name in ("pairs.jsonl", "report.json", "blocks/00000008.jsonl"):
        assert (tmp_path / "broken" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    finished = {record["question"] for record in lines(tmp_path / "broken" / "blocks" / "00000000.jsonl")}
    assert finished and not finished & service.asked.keys() and finished <= before.keys()
    assert cold_start.run(made, tmp_path / "broken") == whole  # a finished run only reports


def test_a_run_stopped_by_sigterm_continues_to_the_result_of_an_uninterrupted_run(service, tmp_path):
    whole = cold_start.run(settings(service, tmp_path / "other"), tmp_path / "whole")
    service.before = lambda text: os.kill(os.getpid(), signal.SIGTERM)
    made = settings(service, tmp_path / "cache")
    assert cold_start.run(made, tmp_path / "run") is None
    assert not list((tmp_path / "run" / "blocks").iterdir())
    service.before = lambda text: None
    assert cold_start.run(made, tmp_path / "run").trajectories == whole.trajectories == 40
    pairs = [(tmp_path / name / "pairs.jsonl").read_bytes() for name in ("run", "whole")]
    assert pairs[0] == pairs[1]


def test_a_workdir_of_another_config_is_refused(service, tmp_path):
    cold_start.run(settings(service, tmp_path / "cache", questions=1), tmp_path / "run")
    with pytest.raises(UserError, match="holds a run of another config"):
        cold_start.run(settings(service, tmp_path / "cache", questions=2), tmp_path / "run")


def test_a_locked_workdir_is_refused(service, tmp_path):
    (tmp_path / "run").mkdir()
    with (
        exclusive_lock(tmp_path / "run", ""),
        pytest.raises(UserError, match=r"run: another process works there\. Wait"),
    ):
        cold_start.run(settings(service, tmp_path / "cache", questions=1), tmp_path / "run")
    assert not service.asked


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[: len(data) // 2]])
def test_an_incomplete_block_is_sampled_again(service, tmp_path, damage, capsys):
    made, file = settings(service, tmp_path / "cache"), tmp_path / "run" / "blocks" / "00000004.jsonl"
    report = cold_start.run(made, tmp_path / "run")
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert cold_start.run(made, tmp_path / "run") == report and file.read_bytes() == whole
    assert "of 16 trajectories: its questions are sampled again" in capsys.readouterr().err


@pytest.mark.parametrize("line", [b'{"number": 0,', b'{"id": "\xff"}', b"7"])
def test_the_error_for_a_damaged_block_names_its_line(service, tmp_path, line):
    made, file = settings(service, tmp_path / "cache", questions=1), tmp_path / "run/blocks/00000000.jsonl"
    cold_start.run(made, tmp_path / "run")
    kept = file.read_bytes().split(b"\n")
    file.write_bytes(b"\n".join([kept[0], line, *kept[2:]]))
    with pytest.raises(UserError, match=r"00000000\.jsonl, line 2: .*; delete that file"):
        cold_start.run(made, tmp_path / "run")


def test_after_an_error_about_long_prompts_the_same_workdir_accepts_a_longer_context(tmp_path):
    made = config("model=assets/miniwiki-policy,retriever=bm25,questions=1")
    made.data.update({"train_worlds": 1, "train_per_kind": 1, "on_error": "stop"})
    made.rollout.update({"rows": 4, "context": 64, "wake_threshold": 4})
    with pytest.raises(UserError, match=r"rollout\.context"):
        cold_start.run(made, tmp_path / "run")
    made.rollout.context = 2048
    refuse_other_config(
        tmp_path / "run", json.loads(json.dumps(ColdStartSettings.from_config(made).identity()))
    )


@pytest.mark.parametrize("name", ["blocks", "report.json", "pairs.jsonl"])
def test_an_occupied_path_is_refused_before_anything_is_sampled(service, tmp_path, name):
    (tmp_path / name).mkdir() if "." in name else (tmp_path / name).write_text("mine")
    with pytest.raises(UserError, match=rf"{name} is a (file|folder), but the run needs .*; move it away"):
        cold_start.run(settings(service, tmp_path / "cache", questions=1), tmp_path)
    assert not service.asked


def test_a_workdir_deleted_during_sampling_raises_a_save_error(service, tmp_path):
    service.before = lambda text: shutil.rmtree(tmp_path / "run", ignore_errors=True)
    with pytest.raises(SaveError, match=r"00000000\.jsonl could not be saved: the folder .* is gone"):
        cold_start.run(settings(service, tmp_path / "cache", questions=1), tmp_path / "run")


def test_blocks_without_a_config_are_refused(service, tmp_path):
    made = settings(service, tmp_path / "cache", questions=1)
    cold_start.run(made, tmp_path / "run")
    (tmp_path / "run" / "config.json").unlink()
    with pytest.raises(UserError, match=r"holds sampled trajectories \(blocks\), but the config\.json"):
        cold_start.run(made, tmp_path / "run")


def test_the_limit_per_question_may_change_after_sampling(service, tmp_path):
    first = cold_start.run(settings(service, tmp_path / "cache", keep=1), tmp_path / "run")
    blocks = [file.read_bytes() for file in sorted((tmp_path / "run" / "blocks").iterdir())]
    again = cold_start.run(settings(service, tmp_path / "cache", keep=0), tmp_path / "run")
    assert first.kept <= again.kept and first.trajectories == again.trajectories
    assert blocks == [file.read_bytes() for file in sorted((tmp_path / "run" / "blocks").iterdir())]


@pytest.mark.slow
def test_cold_start_pairs_sft_and_ppo_run_one_after_the_other(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    save_random_policy(tmp_path / "random")
    cold = config(
        f"recipe=r3rag,init={tmp_path}/random,retriever=bm25,steps=1,demonstrations=5", "miniwiki_cold_start"
    )
    assert stages.run(shrink_cold_start(cold), tmp_path / "cold").stopped == "done"

    data = config(f"model={tmp_path}/cold/model,retriever=bm25,questions=3")
    data.data.update({"train_worlds": 1, "train_per_kind": 1})
    data.rollout.update({"rows": 4, "context": 256, "wake_threshold": 4})
    data.recipe.environment.turn_tokens = 8
    report = cold_start.run(data, tmp_path / "data")  # an untrained policy writes no well-formed step
    assert report.trajectories == 12 and report.fell == {"malformed": 12}
    assert (tmp_path / "data" / "pairs.jsonl").read_text() == ""

    write_pairs(tmp_path / "pairs.jsonl")
    pairs_sft = config(
        f"size=tiny,pairs={tmp_path}/pairs.jsonl,init={tmp_path}/cold/model,steps=2,held_out=2", "r3rag_sft"
    )
    pairs_sft.train.update({"rows": 1, "row_length": 128})
    assert stages.run(pairs_sft, tmp_path / "taught").stopped == "done"
    card = read_card(tmp_path / "taught" / "model")
    assert card.recipe == "r3rag" and card.make().environment.turn_tokens == 128

    run = config(f"policy={tmp_path}/taught/model,retriever=bm25,steps=1", "r3rag_ppo")
    run.data.update({"train_worlds": 1, "held_out_worlds": 1, "held_out_per_kind": 1, "train_per_kind": 4})
    run.train.update({"questions": 2, "eval_every": 0})
    run.rollout.update({"rows": 8, "context": 512, "wake_threshold": 4})
    run.objective.row_lengths = (512,)
    run.critic.layers = 1  # as many as the policy has
    run.recipe.environment.turn_tokens = 8
    outcome = experiment.run(run, tmp_path / "run")
    assert outcome.step == 1 and outcome.final_metrics["eval/em"] == 0
    written = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert "reward/format" in written and "critic/loss" in written
    assert (tmp_path / "run" / "trajectories.html").exists()
