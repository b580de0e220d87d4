"""The stages of supervised training run from their configs and write loadable folders."""

import dataclasses
import hashlib
import importlib.util
import pathlib

import numpy as np
import pytest
from flax import nnx

from rrl.config.sections import DERIVED
from rrl.errors import UserError
from rrl.models.config import DecoderConfig
from rrl.models.decoder import Decoder
from rrl.models.hf import load_decoder, save_decoder
from rrl.models.tokenizer import load_tokenizer
from rrl.rl.optim import OptimConfig
from rrl.runs.retriever import RetrieverConfig
from rrl.sft.config import SFTConfig
from rrl.sft.sources import AlternatingSource, StreamSource
from rrl.sft.stages import OPTIONAL_SECTIONS, DemonstrationConfig, StageSettings, run, scale_parameters
from rrl.sft.streams import StreamConfig, parse_curriculum
from tests.memory import limit_memory

ROOT = pathlib.Path(__file__).parents[2]


def config_of(name, arg):
    spec = importlib.util.spec_from_file_location(name, ROOT / "configs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config(arg)


def small(config):
    """Reduce a config to a small model and world, in place."""
    if config.model:
        config.model.update({"hidden": 16, "layers": 2, "heads": 4, "head_dim": 4, "mlp": 16, "kv_heads": 1})
        config.data.update({"worlds": 2, "probes": 2})
        config.train.update({"rows": 2})
    else:
        config.data.update({"train_worlds": 1, "held_out_worlds": 1})
        config.data.demonstrations.update({"held_out": 5})
        config.train.update({"rows": 1})
    return config


@pytest.mark.parametrize("arg", ["", f"init={ROOT}/assets/miniwiki-policy"])
def test_a_model_larger_than_memory_is_refused_before_it_is_made_or_loaded(tmp_path, monkeypatch, arg):
    name = "miniwiki_cold_start" if arg else "miniwiki_pretrain"
    config = config_of(name, arg or f"tokenizer={ROOT}/assets/miniwiki-tokenizer")
    monkeypatch.setattr("rrl.sft.stages.load_language_model", lambda *_: pytest.fail("nothing may be loaded"))
    limit_memory(monkeypatch, tmp_path, 2**20)
    what = "init=.*" if arg else "model: "
    with pytest.raises(
        UserError, match=f"^{what}the training of this model needs .*: .*activations .* GiB; use a smaller"
    ):
        run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_pretraining_reader_and_cold_start_run_one_after_the_other(tmp_path):
    tokenizer = f"tokenizer={ROOT}/assets/miniwiki-tokenizer"
    first = run(small(config_of("miniwiki_pretrain", f"steps=2,{tokenizer}")), tmp_path / "pretrain")
    assert "match/value" in first.evaluation and first.stopped == "done"
    reader = run(small(config_of("miniwiki_reader", f"steps=2,{tokenizer}")), tmp_path / "reader")
    assert "match/answers" in reader.evaluation
    base = tmp_path / "pretrain" / "model"
    second = run(
        small(config_of("miniwiki_cold_start", f"steps=2,demonstrations=5,init={base}")), tmp_path / "cold"
    )
    assert "match/expert" in second.evaluation
    policy = load_decoder(tmp_path / "cold" / "model")
    assert len(load_tokenizer(tmp_path / "cold" / "model")) == policy.config.vocab_size
    assert load_decoder(tmp_path / "reader" / "model").config.model_type == "llama"


def test_an_unknown_stage_or_field_is_refused_and_nothing_is_written(tmp_path):
    config = config_of("miniwiki_pretrain", "")
    config.stage = "writing"
    with pytest.raises(UserError, match=r"stage='writing'.*reading"):
        run(config, tmp_path / "run")
    config = config_of("miniwiki_pretrain", "")
    config.optim.learning_rate = 1.0
    with pytest.raises(UserError, match="learning_rate"):
        run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "section", "field", "value"),
    [
        ("pretrain", "data", "probes", 0),
        ("pretrain", "data", "long_every", 0),
        ("pretrain", "train", "patience", -1),
        ("pretrain", "train", "minutes", -1.0),
        ("cold_start", "data.demonstrations", "held_out", 0),
        ("cold_start", "data.demonstrations", "top_k", 0),
    ],
)
def test_the_error_for_a_size_out_of_range_names_it_and_nothing_is_written(
    tmp_path, name, section, field, value
):
    tokenizer, policy = f"{ROOT}/assets/miniwiki-tokenizer", f"{ROOT}/assets/miniwiki-policy"
    config = config_of(
        f"miniwiki_{name}", f"tokenizer={tokenizer}" if name == "pretrain" else f"init={policy}"
    )
    inner = config
    for part in section.split("."):
        inner = inner[part]
    inner[field] = value
    with pytest.raises(UserError, match=rf"^{section}\.{field}={value} must be at least"):
        run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_out_path_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "model").write_text("mine")
    with pytest.raises(UserError, match=r"^out='.*model' is a file"):
        run(config_of("miniwiki_pretrain", f"out={tmp_path}/model"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_error_for_a_missing_initial_model_names_the_config_that_trains_it(tmp_path):
    with pytest.raises(UserError, match=rf"init='{tmp_path}/none' holds no model.*miniwiki_pretrain\.py"):
        run(config_of("miniwiki_cold_start", f"init={tmp_path}/none"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_initial_model_with_another_tokenizer_is_refused(tmp_path):
    shape = DecoderConfig(
        vocab_size=1664, hidden=8, layers=1, heads=2, kv_heads=1, head_dim=4, mlp=8, eos_token_id=0
    )
    tokenizer = load_tokenizer(ROOT / "assets" / "miniwiki-tokenizer")
    save_decoder(tmp_path / "model", Decoder(shape, rngs=nnx.Rngs(0)), tokenizer)
    with pytest.raises(UserError, match=rf"init='{tmp_path}/model': the tokenizer's eos_token_id is 2"):
        run(config_of("miniwiki_cold_start", f"init={tmp_path}/model"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["pretrain", "cold_start", "reader"])
def test_a_config_lists_every_field_and_unknown_fields_are_refused(name, tmp_path):
    config = config_of(f"miniwiki_{name}", "")
    kinds = [(config.train, SFTConfig), (config.optim, OptimConfig)]
    kinds += [(config[section], kind) for section, kind in OPTIONAL_SECTIONS.items()]
    if name == "cold_start":
        kinds += [(config.data.demonstrations, DemonstrationConfig), (config.data.retriever, RetrieverConfig)]
    else:
        kinds += [(config.model, DecoderConfig), (config.data, StreamConfig)]
    for section, kind in kinds:
        missing = {field.name for field in dataclasses.fields(kind)} - set(section)
        assert missing <= {*DERIVED, "optim", "rope_scaling"}
    config.extra = 1
    with pytest.raises(UserError, match=r"config\.extra is unknown"):
        run(config, tmp_path / "run")


def test_the_identity_of_a_run_on_pairs_has_the_content_of_their_file(tmp_path):
    file = tmp_path / "pairs.jsonl"
    identities = []
    for content in ("one", "two"):
        file.write_text(content)
        values = config_of("r3rag_sft", f"pairs={file},init=assets/miniwiki-policy")
        identities.append(StageSettings.from_config(values).identity())
    assert identities[0].pop("pairs") == hashlib.sha256(b"one").hexdigest() != identities[1].pop("pairs")
    assert identities[0] == identities[1]
    assert DemonstrationConfig().fingerprint == ""  # `config.data` determines the demonstrations


def test_an_alternating_source_cycles_through_its_sources():
    class Constant(StreamSource):
        def __init__(self, value):
            self.value = value

        def batch(self, step):
            return self.value

    turns = AlternatingSource([Constant("short"), Constant("short"), Constant("long")], steps=2)
    assert np.all([turns.batch(s) == ("long" if s % 6 >= 4 else "short") for s in range(12)])


def test_a_curriculum_limits_passages_by_step_and_then_ends():
    config = StreamConfig(curriculum="1:200;2:300")
    assert [config.most_passages(s) for s in (0, 199, 200, 499, 500)] == [1, 1, 2, 2, None]
    assert StreamConfig().most_passages(0) is None


@pytest.mark.parametrize("text", ["1", "1:200,2:300", "a:2", "0:5", "1:2:3"])
def test_the_error_for_a_malformed_curriculum_gives_its_form(text):
    with pytest.raises(UserError, match="PASSAGES:STEPS"):
        parse_curriculum(text)


def test_scales_multiply_the_initial_parameters_of_their_group_only():
    shape = DecoderConfig(vocab_size=8, hidden=8, layers=2, heads=2, kv_heads=1, head_dim=4, mlp=8)
    plain, scaled = Decoder(shape, rngs=nnx.Rngs(0)), Decoder(shape, rngs=nnx.Rngs(0))
    scale_parameters(scaled, {"embedding": 5.0, "residual": 0.0})
    np.testing.assert_allclose(scaled.embedding[...], 5 * plain.embedding[...])
    assert not scaled.layers.o[...].any() and not scaled.layers.down[...].any()
    np.testing.assert_array_equal(scaled.layers.q[...], plain.layers.q[...])
    with pytest.raises(UserError, match=r"scales\.head"):
        scale_parameters(scaled, {"head": 1.0})
