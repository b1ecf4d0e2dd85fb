"""A mirror holds whole copies of verified checkpoints, or says why it does not, and gives back what it was given."""

import contextlib
import dataclasses
import errno
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

import fsspec
import psutil
import pytest
from fsspec.implementations.local import LocalFileSystem

import jaxlm.configs
from jaxlm import config_files
from jaxlm.config import ConfigError, RunError, build
from jaxlm.train.checkpoints import mirror_layout as layout
from jaxlm.train.checkpoints import mirror_worker as worker
from jaxlm.train.checkpoints.mirror import Mirror, check
from jaxlm.train.checkpoints.remote import Remote, seal, unseal
