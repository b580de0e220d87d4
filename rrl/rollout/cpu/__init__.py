"""What is special to rollouts on a CPU: workers, and the shapes that change no bits."""
