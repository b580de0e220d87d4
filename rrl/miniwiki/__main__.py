"""Write a built-in world or its tokenizer to files.

    python -m rrl.miniwiki --out=FOLDER --split=test --passages=2000 --worlds=10 --questions=200
    python -m rrl.miniwiki --tokenizer=FOLDER

The first command writes passages.jsonl and questions.jsonl (`--questions` of each kind), the second a Hugging Face folder.
"""

import argparse
import json
import sys
from pathlib import Path

from rrl.errors import UserError
from rrl.miniwiki import KINDS, MiniWiki, generate
from rrl.miniwiki.names import SPLITS
from rrl.miniwiki.vocabulary import VOCABULARY_SIZE, build_tokenizer


def write(wiki: MiniWiki, folder: Path, questions: int, seed: int) -> None:
    """Write passages.jsonl ({id, title, text}) and questions.jsonl ({id, question, golden_answers, kind, gold}).

    `gold` holds the titles of the passages that the question requires.
    """
    # Generate the questions first, so that no file is written if there are too few.
    items = [item.question for kind in KINDS for item in wiki.questions(kind, questions, seed)]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "passages.jsonl").open("w", encoding="utf-8") as file:
        for passage in wiki.passages:
            _write_json_line(file, {"id": passage.id, "title": passage.title, "text": passage.text})
    with (folder / "questions.jsonl").open("w", encoding="utf-8") as file:
        for item in items:
            fields = {"id": item.id, "question": item.text, "golden_answers": list(item.answers)}
            _write_json_line(file, fields | {"kind": item.kind, "gold": list(item.gold)})


def _write_json_line(file: object, record: dict) -> None:
    print(json.dumps(record, ensure_ascii=False), file=file)  # type: ignore[call-overload]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code (2 for wrong input)."""
    parser = argparse.ArgumentParser(
        prog="python -m rrl.miniwiki", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--out", type=Path, help="folder for passages.jsonl and questions.jsonl")
    parser.add_argument("--tokenizer", type=Path, help="folder for the tokenizer")
    parser.add_argument("--split", default="train", choices=SPLITS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--passages", type=int, default=2000, help="total number of passages, up to 1,000,000"
    )
    parser.add_argument("--worlds", type=int, default=10, help="number of sub-worlds, which no fact connects")
    parser.add_argument("--questions", type=int, default=200, help="number of questions of each kind")
    parser.add_argument(
        "--vocabulary", type=int, default=VOCABULARY_SIZE, help="number of tokens of the tokenizer"
    )
    args = parser.parse_args(arguments)
    if args.out is None and args.tokenizer is None:
        parser.error("nothing to do: give --out=FOLDER, --tokenizer=FOLDER or both")
    try:
        for flag, folder in (("--out", args.out), ("--tokenizer", args.tokenizer)):
            if folder is not None and folder.is_file():
                raise UserError(f"{flag}={folder} is a file; give a new or an existing folder")
        if args.out is not None:
            wiki = generate(args.split, args.seed, args.passages, args.worlds)
            write(wiki, args.out, args.questions, args.seed)
        if args.tokenizer is not None:
            build_tokenizer(args.seed, args.vocabulary).save_pretrained(args.tokenizer)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
