"""What an endpoint says, read with distrust: waits, counts, messages."""

from __future__ import annotations

import email.utils
import math
import time
from typing import Any

MAX_RETRY_AFTER_S = 600.0


def retry_after(value: str | None) -> float | None:
    """Seconds of a Retry-After header, in either of its forms; None if it has none."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (OverflowError, TypeError, ValueError):
            return None
    return min(max(seconds, 0.0), MAX_RETRY_AFTER_S) if math.isfinite(seconds) else None


def first_line(text: str) -> str:
    """Of a message, and not too much of it; empty of nothing."""
    return (text.splitlines() or [""])[0][:200]


def is_text(text: str) -> bool:
    """Whether it can be written as UTF-8: a lone surrogate cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def sendable(text: str) -> str:
    """What an endpoint said, as a request can hold it: a question mark for each lone surrogate, and
    a dash for nothing, which some endpoints refuse."""
    return text.encode("utf-8", "replace").decode() or "-"


def count_in(usage: Any, name: str) -> int:
    """A count of tokens that an endpoint gave; 0 where it is no such number."""
    value = getattr(usage, name, None)
    return int(value) if isinstance(value, int | float) and 0 <= value < math.inf else 0
