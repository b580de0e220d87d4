"""Question files for the tests of their readers."""

import json
from pathlib import Path


def written(folder: Path, *records: dict) -> Path:
    file = folder / "questions.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file
