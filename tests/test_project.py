"""Promises the project makes about itself."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import stretto

SOURCE = Path(stretto.__file__).parent
CORE = [
    *(SOURCE / name for name in ("trace.py", "idset.py", "effects.py", "masks.py", "recorder.py")),
    *sorted((SOURCE / "runtime").glob("*.py")),
    *sorted((SOURCE / "engines").glob("*.py")),
]
DIALECT_WORDS = re.compile(r"\b(pasta|apar|tip|planned|promise)\b", re.IGNORECASE)


@pytest.mark.parametrize("path", CORE, ids=lambda path: path.name)
def test_the_core_names_no_dialect(path: Path) -> None:
    assert DIALECT_WORDS.findall(path.read_text()) == []


def modules_after(statement: str) -> set[str]:
    code = f"{statement}; import sys; print('\\n'.join(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(ran.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import stretto",
        "import stretto.trace, stretto.effects, stretto.recorder",
        "from stretto import SamplingParams",
        "import stretto.cli",
        "import stretto.dialects",
        "import stretto.methods",
    ],
)
def test_imports_without_torch(statement: str) -> None:
    loaded = modules_after(statement)
    assert not loaded & {"torch", "transformers", "matplotlib"}


def test_the_public_names_are_there() -> None:
    for name in stretto.__all__:
        assert getattr(stretto, name) is not None
    assert set(stretto.__all__) <= set(dir(stretto))
    with pytest.raises(AttributeError, match="nothing_such"):
        _ = stretto.nothing_such
