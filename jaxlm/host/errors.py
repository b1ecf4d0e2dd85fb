"""The errors that end a command with one line; `cli` prints it."""


class ConfigError(ValueError):
    """Bad input from the user: the message is one line that says what is wrong and how to fix it (exit code 2)."""


class RunError(RuntimeError):
    """A run can't go on for a reason outside the program: one line that says why and how to fix it (exit code 1)."""
