"""A trained search agent as a Python object, and the export of its policy."""
