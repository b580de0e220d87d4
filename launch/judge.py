"""Measures how often a judge agrees with the oracle: `python launch/judge.py --judge=FOLDER [--trajectories=FILE]`.

The oracle is a judge that knows the gold answers and passages. The measured judge is the folder of a model, or the http address
of an OpenAI-compatible service. It judges examples from held-out built-in worlds, or the trajectories of a policy if their
questions have gold passages.
"""

from collections.abc import Sequence

from absl import flags

from rrl.runs import launcher

_JUDGE = flags.DEFINE_string(
    "judge", None, "A model's folder, the http address of a service, or oracle (which agrees with itself)."
)
_MODEL = flags.DEFINE_string("judge_model", "", "Name of the model, for a service.")
_QUESTIONS = flags.DEFINE_integer(
    "questions",
    500,
    "Number of questions, a multiple of 5 (there are 5 kinds). Each question yields one example of each judge prompt.",
)
_SPLIT = flags.DEFINE_enum(
    "split", "test", ["dev", "test"], "Split of the worlds that the examples come from."
)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the worlds and the examples.", lower_bound=0)
_TRAJECTORIES = flags.DEFINE_string(
    "trajectories", None, "trajectories.jsonl of a run, to be judged instead of generated examples."
)
_TAG = flags.DEFINE_string(
    "answer", "answer", "Tag of the answers in the trajectories, or the heading before them, with its colon."
)
_CONTEXT = flags.DEFINE_integer(
    "context",
    0,
    "Maximum tokens of prompt and answer, for a model (0: as in its judge card, or 8192).",
    lower_bound=0,
)
flags.mark_flags_as_required(["judge"])


def main(_: Sequence[str]) -> None:
    """Judge the examples and print the agreement."""
    from rrl.data.trajectory_files import load_trajectories
    from rrl.models.hardware import ComputeConfig, MeshConfig
    from rrl.sft.judge_agreement import held_out_judge_examples, judge_examples_of, judge_report
    from rrl.sft.judge_examples import JudgeExamplesConfig
    from rrl.text.spans import tag_named

    if _TRAJECTORIES.value:
        examples = judge_examples_of(load_trajectories(_TRAJECTORIES.value), tag_named(_TAG.value))
    else:
        examples = held_out_judge_examples(_QUESTIONS.value, JudgeExamplesConfig(), _SPLIT.value, _SEED.value)
    judge, mesh = _JUDGE.value or "", MeshConfig().make()
    print(judge_report(judge, _MODEL.value, examples, ComputeConfig(), mesh, context=_CONTEXT.value))


if __name__ == "__main__":
    launcher.run(main)
