"""Says in words which disk error stopped a write or a read, and at which path. Knows Python's errors and TensorStore's."""

import errno
import os
import re

from jaxlm.files import chain

# What a disk may do wrong for a while: a full one, a quota, a bad block or cable, a remount, a network folder that moved.
_PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the last by a limit of the shell
# TensorStore says `[OS error 28: ENOSPC No space left on device]` or `[os_error_code='28']`; other layers only repeat the
# system's words.
_NUMBER = re.compile(r"(?:OS error |\[Errno |os_error_code=')(\d+)")
_PATH = re.compile(r"""["'](/[^"']+)["']""")


class ToldError(OSError):
    """An error whose text is a whole line already, with a path: that of another process."""


def number(error: BaseException) -> int | None:
    """Returns the `errno` of the operating system's error behind `error`; None if there is none."""
    for link in chain(error):
        if isinstance(link, OSError) and link.errno:
            return link.errno
        if match := _NUMBER.search(str(link)):
            return int(match[1])
        for code in _PASSING:
            if os.strerror(code) in str(link):
                return code
    return None


def full(error: BaseException) -> bool:
    """True if the disk, or the quota on it, is full."""
    return number(error) in _FULL


def passing(error: BaseException) -> bool:
    """True for an error that says nothing about what is on the disk: the same operation may work later."""
    return number(error) in _PASSING


def words(error: BaseException, place: object) -> str:
    """Returns one line: what went wrong, and the path at which it did, or `place` where the error names none."""
    if told := next((link for link in chain(error) if isinstance(link, ToldError)), None):
        return str(told)
    code = number(error)
    last = chain(error)[-1]
    text = os.strerror(code) if code else (str(last).splitlines() or [""])[0][:200] or type(last).__name__
    for link in chain(error):
        match = _PATH.search(str(link))
        path = str((isinstance(link, OSError) and link.filename) or (match and match[1]) or "")
        if path and not path.startswith("/proc/"):  # there it is the number of an open folder: `files.plain_path`
            return f"{text}: {path}"
    return f"{text}: {place}"
