"""What is special to rollouts on a CPU: workers, and which shapes give the same bits."""
