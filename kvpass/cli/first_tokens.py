"""The process that ``kvpass bench start`` starts and times."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from kvpass.bench.start import run_asked
    from kvpass.cli.models import load_or_make_model

    run_asked(sys.argv[1], load_or_make_model)
