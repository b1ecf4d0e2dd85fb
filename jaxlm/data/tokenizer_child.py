"""Trains a SentencePiece model, as a process of its own: the lines come by standard input, the model goes to a file.

SentencePiece neither hears signals while it trains nor tells an interrupted iterator from a bad one. A process can be ended.
`jaxlm.data.tokenizer` runs this file. It imports nothing of jaxlm, so that it starts at once.
"""

import contextlib
import ctypes
import json
import signal
import sys

import sentencepiece


def main(model: str, settings: str) -> int:
    """Writes the model to the file `model`. `settings` are those of SentencePieceTrainer.train, as JSON."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    with contextlib.suppress(OSError, AttributeError):  # Linux only
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: without its parent it is of no use
    lines = (line[:-1].decode() for line in sys.stdin.buffer)
    try:
        with open(model, "wb") as out:
            sentencepiece.SentencePieceTrainer.train(sentence_iterator=lines, model_writer=out, **json.loads(settings))
    except (RuntimeError, StopIteration) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
