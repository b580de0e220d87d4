"""R3-RAG's config: the settings of the paper, and arguments for Table 2, the released variants and any retriever."""

import importlib.util
import pathlib

import pytest

from rrl.errors import UserError
from rrl.recipes.r3rag import R3Rag
from rrl.recipes.r3rag_steps import R3RagEnvironment
from rrl.setup.settings import TrainSettings

ROOT = pathlib.Path(__file__).parents[2]
BIG = "size=7b,data=FOLDER,encoder=FOLDER"


def config(arg=""):
    spec = importlib.util.spec_from_file_location("r3rag_ppo", ROOT / "configs" / "r3rag_ppo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config(arg)


def test_the_large_size_has_the_settings_of_the_paper():
    # SPEC.md 2 and 6; section 4.3 and appendix C
    settings = TrainSettings.parse(config(BIG))
    train, objective, critic = settings.train, settings.train.objective, settings.train.critic
    assert train.questions * train.samples == 64
    assert train.temperatures == (0.1, 0.4, 0.7, 1.0)
    assert train.steps * train.questions == 8192
    assert (train.optim.lr, critic.optim.lr) == (5e-7, 9e-6)
    assert (critic.discount, critic.gae_lambda, objective.whiten) == (1.0, 1.0, True)
    assert (objective.kl_in, objective.kl_estimator) == ("loss", "k3") and objective.kl_coef > 0
    assert settings.rollout.top_k == 5
    assert settings.recipe == R3Rag()
    assert settings.recipe.environment == R3RagEnvironment(
        max_steps=5, document_characters=512, cut="document", drop_seen=True
    )
    scales = (R3Rag.correct_scale, R3Rag.incorrect_scale, R3Rag.unanswered_scale)
    assert scales == (1 + 0.6, 1 - 0.2, 1 - 0.1)  # 1 + gamma of appendix C
    assert settings.judge.judge.folder == "models/Qwen2.5-14B-Instruct"


@pytest.mark.parametrize(
    ("arg", "changed"),
    [
        ("ablation=process", {"use_process": False}),
        ("ablation=outcome", {"use_outcome": False}),
        ("last_step=equation", {"last_step": "equation"}),
        ("malformed=released", {"malformed_reward": -0.9}),
        ("cut=block", {"environment": R3RagEnvironment(cut="block")}),
    ],
)
def test_arguments_select_ablations_and_variants(arg, changed):
    assert TrainSettings.parse(config(f"{BIG},{arg}")).recipe == R3Rag(**changed)


def test_the_built_in_world_uses_the_oracle_as_judge_and_rewards_exact_match():
    settings = TrainSettings.parse(config())
    assert settings.judge.judge.kind == "oracle" and settings.recipe.match == "exact"
    assert settings.train.temperatures == (1.0,) and settings.train.critic.across_contexts
    assert settings.train.objective.share_prefixes
    for void in ("ablation=outcome,last_step=equation", "ablation=process,judge=some/folder"):
        with pytest.raises(UserError, match="has no meaning with ablation="):
            config(void)
    without = TrainSettings.parse(config("ablation=process"))
    assert not without.recipe.needs_judge


@pytest.mark.parametrize("kind", ["bm25", "exact", "scann"])
def test_an_evaluation_can_use_any_retriever(kind):
    # Tables 3 and 5
    by_argument = TrainSettings.parse(config(f"steps=0,policy=assets/miniwiki-policy,retriever={kind}"))
    override = config("steps=0,policy=assets/miniwiki-policy")
    override.retriever.kind = kind
    assert by_argument.retriever == TrainSettings.parse(override).retriever
    assert by_argument.retriever.kind == kind and by_argument.train.steps == 0


def test_documents_are_cut_to_512_characters_in_training_and_whole_in_evaluation():
    # SPEC.md 2: "documents cut to 512 characters in RL training"; section 4.3: "complete retrieved documents"
    for arg, characters in (
        (BIG, 512),
        (f"{BIG},steps=0", 0),
        ("steps=0,policy=assets/miniwiki-policy", 512),
    ):
        assert config(arg).recipe.environment.document_characters == characters


def test_a_config_lists_fields_of_recipe_critic_and_judge():
    filled = config()
    assert filled.recipe.correct_scale == 1.6 and filled.recipe.environment.max_steps == 5
    assert filled.critic.clip == "auto" and filled.judge.kind == "oracle"
