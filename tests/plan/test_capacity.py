"""Tests of capacity plans: what is compiled and counted, the report, and the suggested change. The 7B run
fits the documented slices."""

import dataclasses
import importlib.util
import json
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

from configs.rsearch_grpo import get_config
from configs.rsearch_ppo import get_config as get_ppo
from rrl.errors import UserError
from rrl.models.config import DecoderConfig, matrix_parameters
from rrl.parallel.mesh import AXES
from rrl.parallel.topology import CHIPS, GIB, Topology
from rrl.plan import programs
from rrl.plan.capacity import PUBLISHED, CapacityPlan, default_mesh, first_change, plan_capacity, policy_shape
from rrl.plan.estimate import StepCost, Workload, forward_flops, keys_per_layer, step_costs
from rrl.plan.programs import CompiledProgram
from rrl.plan.report import report
from rrl.train.settings import TrainSettings

SEVEN = DecoderConfig.from_hf(PUBLISHED["Qwen2.5-7B"])
TINY = {
    "model_type": "qwen2",
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}


def with_mesh(config, data=1, fsdp=1, tensor=1):
    config.mesh.update(data=data, fsdp=fsdp, tensor=tensor)
    return config


def tiny_config(folder, make=get_config):
    (folder / "config.json").write_text(json.dumps(TINY))
    config = make(f"policy={folder}")
    with config.unlocked():
        config.rollout.update(rows=8, context=64, wake_threshold=2, prefill_tokens=16)
        config.objective.row_lengths = (64,)
        config.objective.microbatch_tokens = 64
    return config


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    config = with_mesh(tiny_config(tmp_path_factory.mktemp("policy")), fsdp=4, tensor=2)
    return plan_capacity(config, "cpu:8")


def test_a_plan_compiles_the_programs_and_reports_memory_traffic_and_verdict(compiled):
    assert [program.name for program in compiled.programs] == ["rollout", "update", "optimiser step"]
    assert compiled.fits
    assert first_change(compiled) == ""
    text = report(compiled)
    for line in (
        "8 x CPU",
        "mesh      data=1, fsdp=4, tensor=2",
        "float32 computation",
        "microbatches of 4 rows of 64 tokens",
        "less than one row for each of the 4 data shards",
        "as compiled",
        "KV cache",
        "optimiser state",
        "collectives of one decode",
        "collectives of one update",
        "IT FITS: ",
    ):
        assert line in text, line


def test_the_parts_of_memory_follow_from_the_shapes(compiled):
    rollout = compiled.memory["rollout"]
    assert (
        rollout["KV cache"] == 2 * 128 * 8 * 2 * 8 * 4 / 8
    )  # k and v, one block of 128 slots, rows, heads, width, float32
    # Embedding and kernels are split eight ways, norms and biases less: slightly more than an eighth.
    whole = 4 * compiled.parameters
    assert whole / 8 < rollout["parameters"] < whole / 4
    assert 2 * rollout["parameters"] <= rollout["optimiser state"] < 2.1 * rollout["parameters"]
    assert compiled.memory["update"]["gradients"] == rollout["parameters"]


@pytest.mark.slow
def test_the_critic_of_ppo_is_compiled_and_counted(tmp_path):
    found = plan_capacity(with_mesh(tiny_config(tmp_path, get_ppo), fsdp=4, tensor=2), "cpu:8")
    assert [program.name for program in found.programs][3:] == ["critic update", "critic step"]
    assert list(found.memory) == list(found.costs) == [program.name for program in found.programs]
    rollout, update = found.memory["rollout"], found.memory["critic update"]
    # The policy's kernels and embedding; the output for values is a column.
    assert rollout["critic"] == pytest.approx(rollout["parameters"], rel=0.05)
    assert update["gradients"] == rollout["critic"]
    assert 2 * rollout["critic"] <= rollout["critic's optimiser"] < 2.1 * rollout["critic"]
    text = report(found)
    for line in ("critic's optimiser", "collectives of one critic update", "IT FITS: "):
        assert line in text, line


def test_a_7b_critic_adds_the_memory_and_flops_of_a_second_model():
    alone, both = (plan_capacity(make("size=7b"), "h100:8") for make in (get_config, get_ppo))
    more = both.memory["update"]["critic"] + both.memory["update"]["critic's optimiser"]
    assert more * 8 == pytest.approx(
        12 * (7.616e9 - 152064 * 3584), rel=0.01
    )  # float32 with Adam's state; the critic has no output head
    assert sum(both.memory["update"].values()) - sum(alone.memory["update"].values()) == pytest.approx(more)
    # In forward passes: values 1, forward 1, backward 2, remat 1. The policy's update has the reference instead of the values.
    headless = both.costs["critic update"].flops
    assert 0.95 < headless / both.costs["update"].flops < 1
    assert both.costs["update"].flops == alone.costs["update"].flops


def test_a_critic_with_fewer_layers_takes_less_memory_and_flops():
    config = get_ppo("size=7b")
    whole = plan_capacity(config, "h100:8")
    config.critic.layers = 7  # of 28
    found = plan_capacity(config, "h100:8")
    layers = 7.616e9 - 2 * 152064 * 3584
    assert (whole.memory["update"]["critic"] - found.memory["update"]["critic"]) * 8 == pytest.approx(
        4 * 0.75 * layers, rel=0.01
    )
    assert found.costs["critic update"].flops == pytest.approx(whole.costs["critic update"].flops / 4)
    assert found.memory["critic update"]["activations"] < whole.memory["critic update"]["activations"]
    config.critic.layers = 29
    with pytest.raises(
        UserError, match=r"^critic\.layers=29 must be at most 28, the policy's \(0: all of them\)"
    ):
        plan_capacity(config, "h100:8")


def test_frozen_parameters_count_in_the_dtype_of_the_computation():
    config = get_config("size=7b")
    config.lora.rank = 8
    found = plan_capacity(config, "h100:8")
    assert found.trained < 0.01 * found.parameters
    whole = 2 * (found.parameters - found.trained) + 4 * found.trained  # bfloat16 base, float32 adapters
    assert whole / 8 <= found.memory["rollout"]["parameters"] < 1.3 * whole / 8
    assert "float32 trained parameters" in report(found)
    config.compute.param_dtype = "bfloat16"
    narrow = plan_capacity(config, "h100:8")
    assert narrow.memory["update"]["gradients"] == found.memory["update"]["gradients"] / 2
    assert "bfloat16 trained parameters" in report(narrow)


def test_a_plan_for_gpus_is_an_estimate_and_the_report_marks_it():
    found = plan_capacity(get_config("size=7b"), "h100:8")
    assert found.programs == []
    assert found.parameters == pytest.approx(7.616e9, rel=1e-3)
    text = report(found)
    assert "AN ESTIMATE: counted, not compiled" in text
    assert "the published shape of Qwen2.5-7B" in text
    assert "IT FITS (an estimate)" in text
    assert "links not counted" in text  # traffic is known only from compiled programs
    assert "attention=cudnn" in text


@pytest.mark.parametrize(
    ("topology", "mesh", "message"),
    [
        ("v9:4x4", {}, "topology='v9:4x4' is unknown"),
        ("h100:8", {"fsdp": 3}, r"must multiply to 8; set --config\.mesh\.data"),
        ("h100:512", {"fsdp": 512}, r"rollout.rows=256 must be a multiple of data x fsdp = 512"),
    ],
)
def test_incompatible_arguments_are_refused_before_anything_is_compiled(topology, mesh, message):
    with pytest.raises(UserError, match=message):
        plan_capacity(with_mesh(get_config("size=7b"), **mesh), topology)


def test_oversubscribed_slots_are_counted():
    config = get_config("size=7b")
    config.rollout.oversubscribed_slots = 64
    found = plan_capacity(config, "h100:8")
    assert "256 rows and 64 oversubscribed slots of" in report(found)
    config.rollout.oversubscribed_slots = 6
    with pytest.raises(
        UserError, match=r"rollout.oversubscribed_slots=6 .* give --config.rollout.oversubscribed_slots=8"
    ):
        plan_capacity(with_mesh(config, fsdp=8), "h100:8")


def test_a_context_beyond_the_positions_of_the_policy_is_refused(tmp_path):
    config = tiny_config(tmp_path)
    with config.unlocked():
        config.rollout.context, config.objective.row_lengths = 256, (256,)
    with pytest.raises(UserError, match=r"a context of 256 tokens .* max_position_embeddings=128"):
        plan_capacity(config, "cpu:8")


def test_a_policy_without_folder_or_published_shape_is_refused():
    with pytest.raises(UserError, match=r"policy='models/Other-1B' is not a Hugging Face folder.*Qwen2.5-7B"):
        policy_shape("models/Other-1B")


def test_the_default_mesh_splits_kv_heads_evenly_and_gives_the_rest_to_fsdp():
    assert default_mesh(SEVEN, 16, 256) == {"data": 1, "fsdp": 4, "tensor": 4}
    assert default_mesh(SEVEN, 64, 256) == {"data": 1, "fsdp": 16, "tensor": 4}
    assert default_mesh(SEVEN, 64, 8) == {"data": 2, "fsdp": 8, "tensor": 4}


def test_forward_flops_equal_a_count_by_hand():
    config = DecoderConfig.from_hf(TINY)
    assert matrix_parameters(config) == 16 * (2 + 2 + 2) * 8 + 16 * 2 * 8 + 3 * 16 * 32
    by_hand = 10 * 2 * matrix_parameters(config) + 10 * (2 * 5 * 8 + 2 * 5 * 8) * 2 + 3 * 2 * 16 * 64
    assert forward_flops(config, 10, 5, 3) == by_hand


def test_keys_outside_a_sliding_window_cost_nothing():
    config = DecoderConfig.from_hf(PUBLISHED["gemma-3-1b"])
    assert config.sliding_layers.count(False) == 4
    assert keys_per_layer(config, 4096) == (4 * 4096 + 22 * 512) / 26
    assert keys_per_layer(config, 100) == 100
    full = dataclasses.replace(config, sliding_layers=(), sliding_window=None)
    saved = forward_flops(full, 10, 4096, 3) - forward_flops(config, 10, 4096, 3)
    assert saved == pytest.approx(10 * 22 * 4 * (4096 - 512) * 4 * 256)


@pytest.mark.parametrize(("name", "parameters"), [("gemma-3-1b-it", 1.0e9), ("gemma-3-4b-it", 3.88e9)])
def test_gemma_3_has_a_known_shape(name, parameters):
    config, _ = policy_shape(name)
    count = matrix_parameters(config) + config.vocab_size * config.hidden
    assert count == pytest.approx(parameters, rel=0.01)


def test_the_roofline_is_the_slowest_of_arithmetic_memory_and_links():
    chip = CHIPS["v5e"]
    assert StepCost(2 * 197e12, 1, 1).seconds(chip, 2) == pytest.approx(1)
    assert StepCost(1, 3 * 819e9, 1).seconds(chip, 1) == pytest.approx(3)
    assert StepCost(1, 1, 400e9).seconds(chip, 16) == pytest.approx(2)


def test_full_remat_costs_one_more_forward_pass():
    settings, mesh = TrainSettings.parse(get_config("size=7b")), AbstractMesh((1, 4, 4), AXES)
    work = Workload.of(settings)
    full, none = (
        step_costs(settings, SEVEN, mesh, work, remat=remat, trained=7e9, traffic={})["update"].flops
        for remat in ("full", "none")
    )
    assert full / none == pytest.approx(5 / 4)


def test_with_adapters_only_they_have_gradients_and_optimiser_state():
    whole, narrow = plan_capacity(get_config("size=7b"), "h100:8"), get_config("size=7b")
    narrow.lora.rank = 32
    found = plan_capacity(narrow, "h100:8")
    assert found.trained < 0.02 * found.parameters
    for part in ("optimiser state", "gradients", "reference"):
        assert found.memory["update"][part] < 0.05 * whole.memory["update"][part]
    assert found.costs["update"].flops / whole.costs["update"].flops == pytest.approx(4 / 5)
    assert "B are trained" in report(found)


def made(memory, sizes=(1, 4, 4), remat="full", spare=0, **objective):
    """Return a plan of the 7B run on v5e:4x4 with made-up memory, in GiB."""
    config = get_config("size=7b")
    config.rollout.oversubscribed_slots = spare
    settings = TrainSettings.parse(config)
    train = dataclasses.replace(
        settings.train, objective=dataclasses.replace(settings.train.objective, **objective)
    )
    return CapacityPlan(
        dataclasses.replace(settings, train=train),
        Topology("v5e:4x4", CHIPS["v5e"], 16, None),
        AbstractMesh(sizes, AXES),
        SEVEN,
        "here",
        7.6e9,
        7.6e9,
        "bfloat16",
        remat,
        "splash",
        {phase: {part: size * GIB for part, size in parts.items()} for phase, parts in memory.items()},
        [],
        {},
        Workload(4096, 1024),
    )


STATE = {"parameters": 1, "reference": 1, "optimiser state": 2}


@pytest.mark.parametrize(
    ("found", "change"),
    [
        (
            made({"rollout": STATE | {"KV cache": 16, "activations": 1}}),
            r"--config.rollout.rows=172 \(now 256\)",
        ),
        (
            made({"rollout": STATE | {"KV cache": 16, "activations": 1}}, spare=256),
            r"--config.rollout.oversubscribed_slots=88 \(now 256\)",
        ),
        (
            made({"rollout": STATE | {"KV cache": 16, "activations": 1}}, spare=64),
            r"--config.rollout.rows=212 --config.rollout.oversubscribed_slots=0 \(now 256 and 64\)",
        ),
        (
            made({"rollout": STATE | {"KV cache": 2, "activations": 16}}),
            "--config.rollout.prefill_tokens=1024",
        ),
        (
            made({"update": STATE | {"gradients": 1, "activations": 16}}, microbatch_tokens=131072),
            r"--config.objective.microbatch_tokens=65536 \(now 131072\)",
        ),
        (
            made({"critic update": STATE | {"critic": 1, "activations": 16}}, remat="dots"),
            r"--config.compute.remat=full \(now dots\)",
        ),
        (
            made({"update": STATE | {"activations": 16}}, remat="dots"),
            r"--config.compute.remat=full \(now dots\)",
        ),
        (
            made({"update": STATE | {"activations": 16}}, sizes=(1, 8, 2)),
            "--config.mesh.data=1 --config.mesh.fsdp=4 --config.mesh.tensor=4: even one row of 8192 tokens",
        ),
        (
            made({"update": STATE | {"activations": 16}}, sizes=(1, 2, 8), microbatch_tokens=16384),
            "--config.rollout.context and objective.row_lengths",
        ),
        (
            made({"update": {"parameters": 8, "optimiser state": 16, "activations": 2}}, sizes=(4, 1, 4)),
            "--config.mesh.data=1 --config.mesh.fsdp=4 --config.mesh.tensor=4: parameters and their state are stored 4 times",
        ),
        (
            made({"update": {"parameters": 8, "optimiser state": 16}}),
            r"--config.lora.rank=32 .*more chips \(about 25\)",
        ),
    ],
)
def test_the_suggested_change_reduces_the_largest_part(found, change):
    assert not found.fits
    lines = report(found).splitlines()
    assert "IT DOES NOT FIT" in lines[-2]
    assert lines[-1].startswith("change first: ")
    assert re.search(change, lines[-1]), lines[-1]


def test_a_program_that_is_too_large_to_compile_is_reported():
    class Refuses:
        def lower(self, *shapes):
            return self

        def compile(self):
            raise jax.errors.JaxRuntimeError(
                "RESOURCE_EXHAUSTED: the total memory required for HLO temporaries (26.00G) exceeds 15.75G"
            )

    mesh = Topology("cpu:8", CHIPS["cpu"], 8, tuple(jax.devices())).mesh(1, 8, 1)
    shapes = (programs._replicated((2**20,), jnp.float32, mesh),)
    program = programs._compile("update", Refuses(), shapes, mesh)
    assert program.argument_bytes + program.temporary_bytes == 26 * GIB
    assert "(26.00G)" in program.refusal
    refused = dataclasses.replace(made({"update": STATE | {"activations": 16}}), programs=[program])
    assert "the compiler refused it" in report(refused)
    assert isinstance(program, CompiledProgram)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: pip install -e '.[tpu]'"
)
@pytest.mark.parametrize(
    ("make", "topology", "rank"),
    [
        pytest.param(get_config, "v5e:4x4", 0, id="grpo-v5e:4x4"),
        pytest.param(get_config, "v5p:4x4x4", 0, id="grpo-v5p:4x4x4"),
        # Two models with Adam's state do not fit 16 v5e; with adapters on the policy the critic fits.
        pytest.param(get_ppo, "v5e:4x4", 32, id="ppo-v5e:4x4-adapters"),
        pytest.param(get_ppo, "v5p:4x4x4", 0, id="ppo-v5p:4x4x4"),
    ],
)
def test_the_7b_rollout_and_updates_compile_and_fit(make, topology, rank):
    config = make("size=7b")
    config.lora.rank = rank
    config.rollout.draft_tokens = 3 if make is get_config else 0
    found = plan_capacity(config, topology)
    print(report(found))
    assert not any(program.refusal for program in found.programs)
    assert found.fits, report(found)
    rollout = found.memory["rollout"]
    assert rollout["activations"] < rollout["KV cache"], (
        "the cache is copied, or the weights of many layers are gathered"
    )
