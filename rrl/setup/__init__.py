"""What an RL run needs before it starts: its settings, the shapes of its models, its memory. Read `settings.py` first."""
