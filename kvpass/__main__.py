"""``python -m kvpass``: the command line from a bare checkout."""

from __future__ import annotations

import sys

from kvpass.cli import main

if __name__ == "__main__":
    sys.exit(main())
