"""What a run was made with: versions, machine, command."""

from __future__ import annotations

import os
import platform
import sys
from typing import Any

PACKAGES = ("torch", "transformers", "peft", "tokenizers", "numpy")


def environment() -> dict[str, Any]:
    """Versions, hardware and the command line, for a run's folder."""
    from importlib.metadata import PackageNotFoundError, version

    import torch

    from stretto import __version__

    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    cuda = torch.cuda.is_available()
    return {
        "stretto": __version__,
        "python": platform.python_version(),
        "packages": found,
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        if cuda
        else [],
        "command": [os.path.basename(sys.argv[0]), *sys.argv[1:]],
    }
