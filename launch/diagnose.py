"""Diagnoses failures of a policy: `python launch/diagnose.py --trajectories=runs/NAME/trajectories.jsonl [--judge=...]`.

Counts overthinking, good thinking and underthinking, and five kinds of error, as in section 3 of TIRESRAG-R1. The judge is
`oracle` (for questions with gold passages), the folder of a model, or the http address of an OpenAI-compatible service. R3-RAG
writes its answers after a heading: --answer="The final answer:".
"""

from collections.abc import Sequence

from absl import flags

from rrl.runs import launcher

_TRAJECTORIES = flags.DEFINE_string("trajectories", None, "trajectories.jsonl of a run.")
_JUDGE = flags.DEFINE_string("judge", "oracle", "oracle, a model's folder, or the http address of a service.")
_MODEL = flags.DEFINE_string("judge_model", "", "Name of the model, for a service.")
_CONTEXT = flags.DEFINE_integer(
    "judge_context", 0, "Maximum tokens of prompt and answer, for a model (0: as in its judge card, or 8192)."
)
_TAG = flags.DEFINE_string(
    "answer", "answer", "Tag of the answers, or the heading before them, with its colon."
)
flags.mark_flags_as_required(["trajectories"])


def main(_: Sequence[str]) -> None:
    """Judge the trajectories and print the diagnosis."""
    from rrl.data.trajectory_files import load_trajectories
    from rrl.eval.diagnose import diagnose, report
    from rrl.models.hardware import ComputeConfig, MeshConfig
    from rrl.rewards.judge_card import JudgeCard, read_judge_card
    from rrl.rewards.judge_prompts import ErrorAnalysis, Sufficiency
    from rrl.rewards.judge_settings import JudgeSettings, judge_sections
    from rrl.text.spans import tag_named

    trajectories = load_trajectories(_TRAJECTORIES.value or "")
    settings = JudgeSettings.parse(judge_sections(_JUDGE.value, _MODEL.value, _CONTEXT.value))
    settings.check()
    if settings.judge.kind == "model":  # check before the first judgement
        (read_judge_card(settings.judge.folder) or JudgeCard()).require_trained_on(Sufficiency, ErrorAnalysis)
    judge = settings.load([t.question for t in trajectories], ComputeConfig(), MeshConfig().make())
    print(report(diagnose(trajectories, judge, tag_named(_TAG.value))))


if __name__ == "__main__":
    launcher.run(main)
