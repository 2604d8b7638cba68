"""``python -m hvdlab``."""

import sys

from hvdlab.runner.command import main

sys.exit(main())
