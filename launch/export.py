"""Exports the policy of a training run as a Hugging Face folder: `python launch/export.py --workdir=FOLDER --out=FOLDER`."""

from collections.abc import Sequence

from absl import flags

from rrl.runs import launcher

_WORKDIR = flags.DEFINE_string("workdir", None, "Workdir of launch/train.py or launch/sft.py.")
_OUT = flags.DEFINE_string("out", None, "Folder to write; it must not exist yet, or be empty.")
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16", "float16"], "Dtype of the weights.")
_STEP = flags.DEFINE_integer("step", None, "Step of the checkpoint (default: the latest).")
_MAX_SHARD_SIZE = flags.DEFINE_string("max_shard_size", "5GB", "Maximum size of one weight file.")
_START = flags.DEFINE_string(
    "start", None, "New path of the folder that the run started from, if it was moved."
)
flags.mark_flags_as_required(["workdir", "out"])


def main(_: Sequence[str]) -> None:
    """Write the folder and print a line about it."""
    from rrl.serve.export import export

    assert _WORKDIR.value is not None and _OUT.value is not None  # required flags
    print(
        export(
            _WORKDIR.value,
            _OUT.value,
            dtype=_DTYPE.value,
            step=_STEP.value,
            max_shard_size=_MAX_SHARD_SIZE.value,
            start=_START.value,
        )
    )


if __name__ == "__main__":
    launcher.run(main, callbacks=False)  # no rollout, hence no host callbacks
