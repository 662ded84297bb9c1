"""``python -m kvpass``."""

import sys

from kvpass.cli import main

sys.exit(main())
