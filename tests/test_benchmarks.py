"""Benchmarks are run by hand; that of accelerators, which few have at hand, is shown to run where there is none."""

import pytest

from benchmarks import accelerator, measure


@pytest.mark.slow
def test_the_accelerators_benchmark_runs_on_a_cpu_and_replaces_its_own_section(tmp_path, monkeypatch):
    results = tmp_path / "RESULTS.md"
    results.write_text("# Measured\n\n## Rollout: tiny's shape, cpu\n\nold\n\n## Another, cpu\n\nkept\n")
    monkeypatch.setattr(measure, "RESULTS", results)
    sizes = ["--shape=tiny", "--batch=2", "--prompt=8", "--read=40", "--rounds=1", "--hf_python=nowhere"]
    with pytest.raises(FileNotFoundError, match="nowhere"):  # before anything is measured
        accelerator.main(sizes)
    without_torch = tmp_path / "python"
    without_torch.write_text("#!/bin/sh\nexit 1\n")
    without_torch.chmod(0o755)
    accelerator.main([*sizes[:-1], f"--hf_python={without_torch}"])
    text = results.read_text()
    assert "old" not in text and "kept" in text
    for words in ("a copy", "a matrix product", "not measured", "at least 5x"):
        assert text.count(words) == 1
