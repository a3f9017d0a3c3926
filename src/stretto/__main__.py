"""`python -m stretto`: the command line."""

import sys

from stretto.cli import main

sys.exit(main())
