"""A trained agent as a thing to call."""
