"""Models that come with the package: adapters and tiny ones, each with a card (`README.md`)."""

from pathlib import Path

FOLDER = Path(__file__).parent / "shipped"
DEFAULT_MODEL = "smollm2-135m-pasta"
"""What answers unless another model is named: the embedded model, taught to promise."""


def shipped() -> dict[str, Path]:
    """Names of the models in this installation, and their folders."""
    if not FOLDER.is_dir():
        return {}
    return {path.name: path for path in sorted(FOLDER.iterdir()) if path.is_dir()}
