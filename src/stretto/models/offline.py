"""Offline mode: whether anything may be fetched."""

import os

ON = frozenset({"1", "true", "yes", "on"})
VARIABLES = ("STRETTO_OFFLINE", "HF_HUB_OFFLINE")


def is_offline(offline: bool | None = None) -> bool:
    """Return `offline`, or if unset whether STRETTO_OFFLINE or HF_HUB_OFFLINE is on."""
    return offline if offline is not None else bool(variables_on())


def variables_on() -> list[str]:
    """Return the names of the environment variables that turn offline mode on."""
    return [name for name in VARIABLES if os.environ.get(name, "").strip().lower() in ON]


def way_online() -> str:
    """Return the words that tell a user how to go online, empty if nothing stands in the way."""
    names = variables_on()
    return f"unset {' and '.join(names)} and " if names else ""
