"""`python -m jaxlm.main --config=configs/X.py [--config.key=value ...]`: runs the program that the config names.

Also the console script `jaxlm`. What is imported here, before signals are held back, is next to nothing.
"""

import sys

from jaxlm import interrupts


def console_script() -> int:
    """Runs `jaxlm VERB ...` as the whole of this process; returns the exit code."""
    return _run(sys.argv[1:])


def _run(argv: list[str]) -> int:
    interrupts.hold()
    from jaxlm import cli

    return cli.main(argv, script=True)


if __name__ == "__main__":
    sys.exit(_run(["train", *sys.argv[1:]]))
