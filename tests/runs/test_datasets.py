"""Datasets of a run: disjoint built-in worlds, splits of folders, retrievers, and identity by content."""

import importlib
import json
import threading

import pytest

from rrl.data.passages import Passage
from rrl.data.questions import Question
from rrl.errors import UserError
from rrl.miniwiki import KINDS
from rrl.retrieval.build import build_index
from rrl.retrieval.serve import make_server
from rrl.runs.datasets import DataConfig, data_fingerprint, hold_out, load_datasets
from rrl.runs.retriever import RetrieverConfig, load_retriever_encoder
from rrl.runs.workdir import refuse_other_config
from rrl.setup import rl_config
from rrl.sft import loop as sft
from tests.retrieval.fakes import WordEncoder

BM25 = RetrieverConfig(kind="bm25")


def test_held_out_worlds_share_no_title_with_training_and_have_every_kind():
    data = DataConfig(
        train_worlds=2, held_out_worlds=2, world_size=100, train_per_kind=6, held_out_per_kind=4
    )
    train, held_out = load_datasets(data, BM25)
    assert not {p.title for p in train.passages} & {p.title for p in held_out.passages}
    assert (len(train.questions), len(held_out.questions)) == (30, 20)
    assert {q.kind for q in held_out.questions} == set(KINDS)
    again, _ = load_datasets(data, BM25)
    assert again.questions == train.questions


def test_the_held_out_questions_of_a_folder_are_its_dev_split(tmp_path):
    passages = [{"id": str(i), "title": f"T{i}", "text": f"text {i}"} for i in range(4)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(map(json.dumps, passages)))
    for name, count in (("train", 5), ("dev", 3)):
        lines = [
            json.dumps({"id": f"{name}{i}", "question": "q?", "golden_answers": ["a"]}) for i in range(count)
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    train, held_out = load_datasets(DataConfig(path=str(tmp_path), held_out=2), BM25)
    assert [q.id for q in train.questions] == [f"train{i}" for i in range(5)]
    assert [q.id for q in held_out.questions] == ["dev0", "dev1"]
    assert held_out.retriever is train.retriever


def test_every_fifth_question_of_a_single_file_is_held_out():
    questions = [Question(str(i), "q", ("a",)) for i in range(10)]
    train, held_out = hold_out(questions)
    assert [q.id for q in held_out] == ["0", "5"]
    assert len(train) == 8
    with pytest.raises(UserError, match="at least 2"):
        hold_out(questions[:1])


def test_a_dense_retriever_without_an_encoder_is_refused():
    with pytest.raises(UserError, match=r"retriever\.encoder"):
        load_datasets(DataConfig(), RetrieverConfig(kind="scann"))


def test_kind_off_gives_no_retriever():
    data = DataConfig(train_worlds=1, held_out_worlds=1, world_size=60, train_per_kind=2, held_out_per_kind=2)
    train, _ = load_datasets(data, RetrieverConfig(kind="off"))
    assert train.retriever is None


def test_a_folder_can_be_searched_through_an_index_or_a_service(tmp_path):
    passages = [Passage(str(i), f"T{i}", f"text {i}") for i in range(4)]
    build_index(passages, tmp_path / "index", "bm25")
    lines = [json.dumps({"id": f"q{i}", "question": "q?", "golden_answers": ["a"]}) for i in range(5)]
    data = tmp_path / "data"
    data.mkdir()
    (data / "questions.jsonl").write_text("\n".join(lines))
    config = RetrieverConfig(kind="bm25", index=str(tmp_path / "index"))
    train, _ = load_datasets(DataConfig(path=str(data)), config)
    assert train.retriever.search(["T3"], 1)[0][0].passage == passages[3]
    server = make_server(train.retriever, port=0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    remote = RetrieverConfig(kind="bm25", index=f"http://127.0.0.1:{server.server_port}", form="flashrag")
    service = load_datasets(DataConfig(path=str(data)), remote, search_seconds=30)[0].retriever
    assert service.kind == "http"
    policy = service.retry_policy
    assert (policy.time_out, policy.retries) == (10, 2), "three attempts in 30 seconds"
    assert service.search(["T3"], 1)[0][0].passage == passages[3]
    server.shutdown()
    server.server_close()
    with pytest.raises(UserError, match=r"retriever.index=http://.* does not answer.* Start the service"):
        load_datasets(DataConfig(path=str(data)), remote)
    with pytest.raises(UserError, match="data=FOLDER"):
        load_datasets(DataConfig(), config)


def test_an_identity_without_an_index_has_no_index_fields_and_an_index_may_be_moved(tmp_path):
    assert set(BM25.identity()) == {"kind", "encoder", "title_weight", "k1", "b"}
    for name in ("here", "there"):
        build_index([Passage("0", "T", "text")], tmp_path / name, "bm25")
    here, there = (RetrieverConfig(index=str(tmp_path / name)).identity() for name in ("here", "there"))
    assert here == there, "an index may be moved"


def test_the_identity_of_a_service_is_its_address_and_form():
    service = RetrieverConfig(kind="scann", index="http://127.0.0.1:9", form="flashrag", title_weight=3)
    assert service.identity() == {
        "kind": "http",
        "encoder": "",
        "index": "http://127.0.0.1:9",
        "form": "flashrag",
    }


def test_an_unused_encoder_is_refused(tmp_path):
    build_index([Passage("0", "T", "text")], tmp_path / "index", "bm25")
    for index in (str(tmp_path / "index"), "http://127.0.0.1:9"):
        with pytest.raises(
            UserError, match=rf"encoder='e5' has no meaning with .*{index}.*config\.retriever\.encoder="
        ):
            RetrieverConfig(index=index, encoder="e5").identity()
    for file in ("rsearch_grpo", "rsearch_ppo", "miniwiki_cold_start"):
        get_config = importlib.import_module(f"configs.{file}").get_config
        with pytest.raises(UserError, match=r"encoder='e5' has no meaning with retriever=bm25"):
            get_config("retriever=bm25,encoder=e5")
        get_config("retriever=bm25")
        get_config("encoder=e5")


def test_a_resumed_run_over_a_large_corpus_reuses_its_index(tmp_path, monkeypatch):
    monkeypatch.setattr("rrl.retrieval.index.BRUTE_FORCE_BELOW", 4)
    monkeypatch.setattr("rrl.runs.datasets.load_retriever_encoder", lambda config: WordEncoder())
    data, workdir = tmp_path / "data", tmp_path / "run"
    data.mkdir()
    passages = [{"id": str(i), "title": f"T{i}", "text": f"text {i}"} for i in range(4)]
    (data / "corpus.jsonl").write_text("\n".join(map(json.dumps, passages)))
    lines = [json.dumps({"id": f"q{i}", "question": "q?", "golden_answers": ["a"]}) for i in range(5)]
    (data / "questions.jsonl").write_text("\n".join(lines))

    def best() -> str:
        train, _ = load_datasets(DataConfig(path=str(data)), RetrieverConfig("exact"), workdir=workdir)
        return train.retriever.search(["T3"], 1)[0][0].passage.id

    assert best() == "3" and len(list(workdir.glob("indexes/*/manifest.json"))) == 1
    monkeypatch.setattr("rrl.retrieval.index.build_index", None)
    assert best() == "3"


def test_question_files_without_answers_are_not_used(tmp_path):
    (tmp_path / "corpus.json").write_text(json.dumps([{"title": "T", "text": "x"}]))
    for name, answer in (("train", "a"), ("dev", "b"), ("test", "")):
        asked = [{"_id": f"{name}{i}", "question": "q?", "context": [], "answer": answer} for i in range(3)]
        (tmp_path / f"{name}.json").write_text(json.dumps(asked))
    train, held_out = load_datasets(DataConfig(path=str(tmp_path)), BM25)
    assert (train.questions[0].id, held_out.questions[0].id) == ("train0", "dev0")
    (tmp_path / "dev.json").unlink()
    train, held_out = load_datasets(DataConfig(path=str(tmp_path)), BM25)
    assert ([q.id for q in train.questions], held_out.questions[0].id) == (["train1", "train2"], "train0")
    (tmp_path / "train.json").unlink()
    with pytest.raises(UserError, match="none of its question files has gold answers"):
        load_datasets(DataConfig(path=str(tmp_path)), BM25)


def test_the_fingerprint_of_data_depends_on_content_not_on_location(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    (here / "below").mkdir(parents=True)
    (here / "questions.jsonl").write_text("one\n")
    found = data_fingerprint(str(here))
    assert found["files"] == {"questions.jsonl": 4}
    here.rename(there)
    assert data_fingerprint(str(there)) == found
    (there / "questions.jsonl").write_text("two\n")
    assert data_fingerprint(str(there))["content"] != found["content"]


@pytest.mark.parametrize("train", [rl_config, sft])
def test_the_path_of_the_data_may_differ_when_a_run_continues(tmp_path, train):
    old = {"run": {"data": {"path": "here", "seed": 0, "files": {"q.jsonl": 1}}}}
    (tmp_path / "config.json").write_text(json.dumps(old))
    new = {
        "run": {"data": {"path": "there", "seed": 0, "files": {"q.jsonl": 1}, "content": {"q.jsonl": "a"}}}
    }
    refuse_other_config(tmp_path, new, train.MAY_DIFFER)
    new["run"]["data"]["seed"] = 1
    with pytest.raises(UserError, match=r"run\.data\.seed: 0 there, 1 now"):
        refuse_other_config(tmp_path, new, train.MAY_DIFFER)


def test_the_name_of_a_run_may_differ_when_it_continues(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"run": {"name": "tiny-data=here-steps=1"}, "steps": 1}))
    new = {"run": {"name": "tiny-data=there-steps=2"}, "steps": 2}
    assert refuse_other_config(tmp_path, new, rl_config.MAY_DIFFER, rl_config.MAY_GROW) == {"steps": (1, 2)}


@pytest.mark.parametrize(("title_weight", "titles"), [(3, True), (1, True), (0, False)])
def test_a_title_weight_of_0_leaves_titles_out_of_embeddings_too(title_weight, titles):
    config = RetrieverConfig(kind="exact", encoder="assets/miniwiki-encoder", title_weight=title_weight)
    encoder = load_retriever_encoder(config)
    assert encoder is not None and encoder.titles is titles
