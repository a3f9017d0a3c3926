"""What a run was made with: versions, machine, commit, command."""

from __future__ import annotations

import os
import shlex
import sys
from typing import Any


def environment(device: str) -> dict[str, Any]:
    """For a run's folder: the command line, PEFT's version, and `describe_machine`."""
    from importlib.metadata import version

    from stretto.bench.machine import describe_machine

    return {
        "command": shlex.join([os.path.basename(sys.argv[0]), *sys.argv[1:]]),
        "peft": version("peft"),
        "machine": describe_machine(device),
    }
