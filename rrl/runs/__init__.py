"""Parts that all long runs share: data, workdir, checkpoints, metrics, progress line and launcher."""
