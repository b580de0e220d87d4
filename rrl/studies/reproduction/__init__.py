"""The reproduction in the small: a list of runs, a list of claims over what they leave, and a page of what holds."""
