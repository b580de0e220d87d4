"""The decoder's layers on a CPU, as one compiled kernel."""
