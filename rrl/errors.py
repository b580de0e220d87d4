"""The one exception for wrong input: launchers print it and exit with code 2."""


class UserError(ValueError):
    """Wrong input by the user.

    The message names what is wrong (field, file, line), the value found, what is allowed, and how to fix it.
    """
