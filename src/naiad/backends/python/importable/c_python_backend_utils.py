"""Stands for `naiad.backends.python.pb_utils` in processes that a model spawns: its folder is on their `sys.path`."""

import sys

from naiad.backends.python import pb_utils

sys.modules[__name__] = pb_utils
