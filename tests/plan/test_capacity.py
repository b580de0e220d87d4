"""Tests of capacity plans: what is compiled and counted, and the report. The 7B run fits the documented slices."""

import importlib.util
import json

import pytest

from configs.rsearch_grpo import get_config
from configs.rsearch_ppo import get_config as get_ppo
from rrl.errors import UserError
from rrl.plan.capacity import default_mesh, plan_capacity
from rrl.plan.report import report
from rrl.plan.suggestion import suggest_change
from tests.plan.plans import SEVEN, TINY


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
    assert suggest_change(compiled) == ""
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
    programs = [program.name for program in found.programs]
    assert list(found.costs) == programs and list(found.memory) == [*programs, "reader"]
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
    assert "the published architecture of Qwen2.5-7B" in text
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


def test_the_default_mesh_splits_kv_heads_evenly_and_gives_the_rest_to_fsdp():
    assert default_mesh(SEVEN, 16, 256) == {"data": 1, "fsdp": 4, "tensor": 4}
    assert default_mesh(SEVEN, 64, 256) == {"data": 1, "fsdp": 16, "tensor": 4}
    assert default_mesh(SEVEN, 64, 8) == {"data": 2, "fsdp": 8, "tensor": 4}


def test_with_adapters_only_they_have_gradients_and_optimiser_state():
    whole, narrow = plan_capacity(get_config("size=7b"), "h100:8"), get_config("size=7b")
    narrow.lora.rank = 32
    found = plan_capacity(narrow, "h100:8")
    assert found.trained < 0.02 * found.parameters
    for part in ("optimiser state", "gradients", "reference"):
        assert found.memory["update"][part] < 0.05 * whole.memory["update"][part]
    assert found.costs["update"].flops / whole.costs["update"].flops == pytest.approx(4 / 5)
    assert "B are trained" in report(found)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: pip install -e '.[tpu]'"
)
@pytest.mark.parametrize(
    ("make", "policy", "topology", "rank"),
    [
        pytest.param(get_config, "", "v5e:4x4", 0, id="grpo-v5e:4x4"),
        pytest.param(get_config, "", "v5p:4x4x4", 0, id="grpo-v5p:4x4x4"),
        # A cache of all positions of all layers would take 17 GiB.
        pytest.param(get_config, "gemma-3-4b", "v5e:4x4", 0, id="grpo-v5e:4x4-gemma-3-4b"),
        # Two models with Adam's state do not fit 16 v5e; with adapters on the policy the critic fits.
        pytest.param(get_ppo, "", "v5e:4x4", 32, id="ppo-v5e:4x4-adapters"),
        pytest.param(get_ppo, "", "v5p:4x4x4", 0, id="ppo-v5p:4x4x4"),
    ],
)
def test_the_rollout_and_updates_of_large_models_compile_and_fit(make, policy, topology, rank):
    config = make(f"size=7b,policy={policy}" if policy else "size=7b")
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
