"""`parse_plan`: plans from their printed form, in which ops and files name them."""

from __future__ import annotations

from functools import cache

from kvpass.errors import PlanError, shown
from kvpass.format.chunked_plan import ChunkedPlan
from kvpass.format.tensor_plan import TensorPlan


@cache
def parse_plan(text: str) -> TensorPlan:
    """The plan that prints as ``text``, e.g. ``int2.token32/window=128,flush=1``.

    Raises:
        PlanError: if there is none.
    """
    for kind in (TensorPlan, ChunkedPlan):
        if (plan := kind.read(text)) is not None:
            return plan
    raise PlanError(
        f"Tensor plan {shown(text)} cannot be read; allowed: 'fp' or e.g. "
        "'int2.channel32/window=0,flush=128', 'int2.channel32|int4.channel32|fp/chunk=32'."
    )
