"""jaxlm: from raw text to a language model that others can run, in JAX."""

import sys

# Nothing else of the package is read by an older Python, so that this line is all that one sees there.
if sys.version_info < (3, 11):  # noqa: UP036
    sys.stderr.write("jaxlm needs Python 3.11 or newer; this is Python %d.%d\n" % sys.version_info[:2])  # noqa: UP031
    sys.exit(2)

__version__ = "0.1.0"
