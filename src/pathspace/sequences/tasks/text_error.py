"""The error of all tasks."""


class ImpossibleTextError(ValueError):
    """A text that the generator cannot produce."""
