"""`python -m jaxlm.main --config=configs/X.py [--config.key=value ...]`: runs the program that the config names."""

import sys

from jaxlm import cli

if __name__ == "__main__":
    sys.exit(cli.main(["train", *sys.argv[1:]], script=True))
