"""Config files: typed arguments, sections as frozen dataclasses, renamed fields, and what all training configs share."""
