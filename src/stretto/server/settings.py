"""What a server is set to. Imports nothing heavy: bad values fail before a model is loaded."""

from __future__ import annotations

import ipaddress
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from stretto.errors import InvalidInput
from stretto.params import check_int

KEYS_VARIABLE = "STRETTO_API_KEYS"
_KEY = re.compile(r"[!-~]{8,512}")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9.-]+(:\d+)?|[a-z]+://\[[0-9a-f:]+\](:\d+)?")
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True)
class Settings:
    """How a server treats its clients. Raises `InvalidInput` for a bad value.

    `name`: the model's id on the wire; None: the LM's own. `max_tokens`: of a request that names
    none. `max_requests`: samples under way at once, running or waiting; more get a 429. A quarter
    of them is for requests of one sample alone.
    `deadline_s`: a request that takes longer is cancelled. `drain_s`: what requests under way get
    to finish when the server is told to end. `stall_s`: a reader that takes nothing for so long is
    cancelled. `keys`: bearer keys, any of which opens the API; none: it is open. `hosts`: values
    of the Host header that are answered, ports aside; none: all.
    """

    name: str | None = None
    max_tokens: int = 1024
    max_requests: int = 256
    deadline_s: float = 600.0
    drain_s: float = 30.0
    stall_s: float = 60.0
    max_body_bytes: int = 4 << 20
    body_timeout_s: float = 30.0
    keys: tuple[str, ...] = field(default=(), repr=False)
    hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()

    @property
    def max_samples(self) -> int:
        """Samples under way at once for a request of several to be admitted, its own included."""
        return self.max_requests - self.max_requests // 4

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_requests", "max_body_bytes"):
            check_int(name, getattr(self, name), 1)
        for name in ("deadline_s", "drain_s", "stall_s", "body_timeout_s"):
            value = getattr(self, name)
            least = 0 if name == "drain_s" else 1e-3
            if not (math.isfinite(value) and value >= least):
                raise InvalidInput(f"{name} must be at least {least} seconds, got {value}")
        if self.name is not None and not (self.name and self.name.isprintable()):
            raise InvalidInput(f"a model's name must be printable text, got {self.name!a}")
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise InvalidInput(
                    f"{origin!a} is no origin; write it as browsers do: https://example.org"
                )
        for number, key in enumerate(self.keys, start=1):
            if not _KEY.fullmatch(key):
                raise InvalidInput(
                    f"API key {number} is not 8 to 512 printable ASCII characters; choose another"
                )


def keys_from(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The bearer keys in `STRETTO_API_KEYS`, separated by commas or spaces."""
    return tuple(key for key in re.split(r"[,\s]+", environment.get(KEYS_VARIABLE, "")) if key)


def is_loopback(host: str) -> bool:
    """Whether an address to listen at is reachable from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_address(host: str, keys: tuple[str, ...], allow_open: bool) -> None:
    """Raises `InvalidInput` for an address that others reach without a key, unless allowed."""
    if is_loopback(host) or keys or allow_open:
        return
    raise InvalidInput(
        f"--host {host!a} is reachable from other machines and there is no key; set "
        f"{KEYS_VARIABLE}, or pass --allow-no-key"
    )
