"""Torch's random state, left as it was."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch


def random_state_kept(device: torch.device) -> AbstractContextManager[None]:
    """While it lasts, torch's generators may be seeded; afterwards they are as they were.

    Those of the CPU and of `device` alone: to ask another GPU for its state is to take memory of
    it, in each process.
    """
    own = [device] if device.type == "cuda" else []
    return torch.random.fork_rng(devices=own, device_type="cuda")
