"""`parse_plan`: plans from their printed form, in which ops and files name them."""

from __future__ import annotations

import re
import warnings
from functools import cache

from kvpass.errors import PlanError, shown
from kvpass.format.chunked_plan import ChunkedPlan
from kvpass.format.sharded_plan import ShardedChunks, ShardedPlan
from kvpass.format.tensor_plan import TensorPlan

# Words of kvpass 0.1, which plan files have, by what they are called now.
_FORMER = {
    r"\.slots\b": ".ternary_in_2bit",
    r"\.pairs\b": ".half_split",
    r"\.table(?=[-\d])": ".codebook",
    r"\bint3x11([^|/]*)": r"int3\1.pack11",
    r"\bflush=": "pack_every=",
    r"\bkept=": "retained=",
}


@cache
def parse_plan(text: str) -> TensorPlan:
    """The plan that prints as ``text``, e.g. ``int2.token32/window=128,pack_every=1``.

    Raises:
        PlanError: if there is none.
    """
    modern = modern_words(text)
    for kind in (TensorPlan, ChunkedPlan, ShardedPlan, ShardedChunks):
        if (plan := kind.read(modern)) is not None:
            if modern != text:
                warnings.warn(
                    f"kvpass: plan {shown(text)} is written {shown(modern)} now; the old words "
                    "are read by this release only.",
                    FutureWarning,
                    stacklevel=2,
                )
            return plan
    raise PlanError(
        f"Tensor plan {shown(text)} cannot be read; allowed: 'fp' or e.g. "
        "'int2.channel32/window=0,pack_every=128', 'int2.channel32|int4.channel32|fp/chunk=32'."
    )


def modern_words(text: str) -> str:
    """A printed plan of kvpass 0.1 as it is printed now; others as they are."""
    for former, word in _FORMER.items():
        text = re.sub(former, word, text)
    return text
