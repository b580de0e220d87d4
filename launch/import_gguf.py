"""Imports a GGUF file as a Hugging Face folder: `python launch/import_gguf.py --gguf=FILE --out=FOLDER`.

Needs the extra `[gguf]`.
"""

from collections.abc import Sequence

from absl import flags

from rrl.runs import launcher

_GGUF = flags.DEFINE_string("gguf", None, "GGUF file of a Llama, Qwen2, Qwen3 or Gemma 3 model.")
_OUT = flags.DEFINE_string("out", None, "Folder to write; it must not exist yet, or be empty.")
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32", "float16"], "Dtype of the weights.")
flags.mark_flags_as_required(["gguf", "out"])


def main(_: Sequence[str]) -> None:
    """Write the folder and print a line about it."""
    from rrl.models.gguf_import import import_gguf
    from rrl.runs.workdir import refuse_unwritable

    assert _GGUF.value is not None and _OUT.value is not None  # required flags
    refuse_unwritable(_OUT.value, "out")
    print(import_gguf(_GGUF.value, _OUT.value, dtype=_DTYPE.value or "bfloat16"))


if __name__ == "__main__":
    launcher.run(main, callbacks=False)
