"""How good is a judge? `python launch/judge.py --judge=FOLDER [--trajectories=FILE]`: its agreement with the oracle.

Over cases of held-out built-in worlds, or over what a policy did, where the questions name their gold passages. The judge is
the folder of a model, or the http address of an OpenAI-compatible service.
"""

from collections.abc import Sequence

from absl import flags

from rrl.runs import launcher

_JUDGE = flags.DEFINE_string("judge", None, "A model's folder, http://… of a service, or oracle.")
_MODEL = flags.DEFINE_string("judge_model", "", "Of a service: the model's name.")
_QUESTIONS = flags.DEFINE_integer(
    "questions", 500, "Questions, each of which gives one case of each kind; a multiple of 5."
)
_SPLIT = flags.DEFINE_enum("split", "test", ["dev", "test"], "Whose worlds.")
_SEED = flags.DEFINE_integer("seed", 0, "Which worlds and cases.", lower_bound=0)
_TRAJECTORIES = flags.DEFINE_string("trajectories", None, "trajectories.jsonl of a run, in place of cases.")
_TAG = flags.DEFINE_string(
    "answer", "answer", "Of trajectories: the tag of answers, or their heading with its colon."
)
_CONTEXT = flags.DEFINE_integer(
    "context",
    0,
    "Of a model: most tokens of a case and its answer; 0: what its card says, or 8,192.",
    lower_bound=0,
)
flags.mark_flags_as_required(["judge"])


def main(_: Sequence[str]) -> None:
    """Asks and prints."""
    from rrl.data.trajectory_files import load_trajectories
    from rrl.models.hardware import ComputeConfig, MeshConfig
    from rrl.sft.judge_agreement import held_out_judge_examples, judge_examples_of, judge_report
    from rrl.sft.judge_examples import JudgeExamplesConfig
    from rrl.text.spans import tag_named

    if _TRAJECTORIES.value:
        cases = judge_examples_of(load_trajectories(_TRAJECTORIES.value), tag_named(_TAG.value))
    else:
        cases = held_out_judge_examples(_QUESTIONS.value, JudgeExamplesConfig(), _SPLIT.value, _SEED.value)
    judge, mesh = _JUDGE.value or "", MeshConfig().make()
    print(judge_report(judge, _MODEL.value, cases, ComputeConfig(), mesh, context=_CONTEXT.value))


if __name__ == "__main__":
    launcher.run(main)
