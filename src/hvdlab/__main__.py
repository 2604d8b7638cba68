"""``python -m hvdlab``."""

import sys

from hvdlab.runner.cli import main

sys.exit(main())
