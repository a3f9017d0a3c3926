"""`stretto` and `python -m stretto`: the command line."""

import sys


def main() -> int:
    """Runs the command line; Ctrl-C is no traceback even while it is still being imported."""
    try:
        from stretto.cli import main as run

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
