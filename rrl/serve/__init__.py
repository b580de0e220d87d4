"""A trained agent in use: as a Python object, and as a folder for other tools."""
