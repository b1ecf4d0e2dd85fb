"""`python -m jaxlm.main --config=configs/X.py [--config.key=value ...]`: runs the program that the config names.

Also the console script `jaxlm`. What is imported here, before signals are held back, is next to nothing.
"""

import gc
import os
import sys

from jaxlm.host import interrupts


def console_script() -> int:
    """Runs `jaxlm VERB ...` as the whole of this process; returns the exit code."""
    return _run(sys.argv[1:])


def _run(argv: list[str]) -> int:
    interrupts.hold()
    # A start makes a million objects that stay. To look at them again after every 700 took a tenth of it.
    gc.set_threshold(100_000, 50, 100)
    if "_ARGCOMPLETE" in os.environ:  # Tab was pressed
        from jaxlm.cli import completion

        completion.answer()
    from jaxlm.cli import cli

    return cli.main(argv, script=True)


if __name__ == "__main__":
    sys.exit(_run(["train", *sys.argv[1:]]))
