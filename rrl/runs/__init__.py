"""What every long run shares: its folder, checkpoints, metrics, progress and launcher."""
