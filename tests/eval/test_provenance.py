"""The commit of the code that computes a result."""

import subprocess

from rrl.eval.provenance import current_commit


def test_the_commit_is_that_of_rrl_in_any_current_folder(tmp_path, monkeypatch) -> None:
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *command], check=True)
    here = current_commit()
    monkeypatch.chdir(tmp_path)
    assert current_commit() == here
    monkeypatch.setattr("rrl.eval.provenance.CHECKOUT", tmp_path / "site-packages")
    (tmp_path / "site-packages").mkdir()
    assert current_commit() == "unknown"
