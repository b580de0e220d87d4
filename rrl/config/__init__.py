"""Arguments and sections of config files, as typed values."""
