"""`stretto` and `python -m stretto`: the command line."""

import sys


def main() -> int:
    """Runs the command line; Ctrl-C is no traceback even while it is still being imported."""
    try:
        from stretto.cli import main as run

        return run()
    except KeyboardInterrupt:
        from stretto.errors import INTERRUPTED

        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
