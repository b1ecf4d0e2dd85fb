"""All of the package's metadata is in pyproject.toml. This tells an old Python, for which pip would blame a dependency."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit("jaxlm needs Python 3.11 or newer; this is Python %d.%d" % sys.version_info[:2])  # noqa: UP031

from setuptools import setup

setup()
