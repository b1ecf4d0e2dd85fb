"""The progress line."""

import io
import os

from jaxlm.train.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


RECORD = {"step": 5, "train/loss": 2.0, "tokens_per_second": 1500.0, "mfu_palm": 0.5, "cost_usd": 1.5, "eta_s": 3725}


def test_progress_is_one_line_in_a_terminal_and_plain_lines_elsewhere():
    for stream, ends in ((Terminal(), 0), (io.StringIO(), 2)):
        progress = Progress(10, stream)
        progress.update(RECORD)
        progress.update(RECORD)
        assert stream.getvalue().count("\n") == ends
        for part in ("step 5/10", "loss 2.0000", "1.5k tokens/s", "MFU 50.0%", "$1.50", "ETA 1h02m"):
            assert part in stream.getvalue()
    terminal = Terminal()
    progress = Progress(10, terminal)
    progress.update(RECORD)
    progress.message("held-out 3")
    assert terminal.getvalue().endswith("\rheld-out 3\n")


def test_a_terminal_that_is_gone_stops_nothing():
    ours, theirs = os.openpty()
    with open(theirs, "w") as stream:
        progress = Progress(10, stream)
        progress.update(RECORD)
        assert os.read(ours, 5) == b"\rstep"
        os.close(ours)
        progress.update(RECORD)  # EIO
        progress.message("held-out 3")
        progress.close()


def test_a_closed_stream_stops_nothing():
    for stream in (io.StringIO(), open(os.devnull, "w")):
        stream.close()
        progress = Progress(10, stream)
        progress.update(RECORD)
        progress.message("held-out 3")
        progress.close()
