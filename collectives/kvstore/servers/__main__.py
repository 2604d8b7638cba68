"""``python -m hvdlab.collectives.kvstore.servers``: the process of a parameter server. Ranks start it; see ``starting``."""

import sys

from hvdlab.collectives.kvstore.servers.process import main

if __name__ == "__main__":
    sys.exit(main())
