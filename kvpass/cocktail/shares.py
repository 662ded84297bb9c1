"""How many of a prompt's chunks get which bits, where nobody has asked yet."""

from __future__ import annotations

from kvpass.format.chunked_plan import ChunkedPlan

# The shares of Cocktail's chunks in the fewest bits, and exact, as its search finds them in the
# documents of examples/cocktail.py; other numbers of bits share the rest.
FEWEST, EXACT = 0.88, 0.035


def segment_tokens(plan: ChunkedPlan, tokens: int) -> list[int]:
    """The tokens of a prompt in each segment: of its chunks most in the fewest bits, few exact.
    What does not come to a whole chunk is exact."""
    between = len(plan.chunk_codecs) - 1
    shares = [FEWEST, *[(1 - FEWEST - EXACT) / max(between, 1)] * between]
    packed = [int(share * (tokens // plan.chunk)) * plan.chunk for share in shares]
    return [*packed, tokens - sum(packed)]
