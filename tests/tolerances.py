"""Every tolerance of the tests, each with its reason. Absolute, on values of the order of one."""

from __future__ import annotations

import torch

# The same decoded values through two dense attentions: float32 sums in another order, two layers
# deep.
LOGITS_FP32 = 5e-6
# bf16 has 8 bits: one rounding of a score near 8 is 0.03. The fused form keeps scores in float32
# where the model's eager attention rounds them to bf16 before the softmax; with SDPA both round
# alike.
LOGITS_BF16 = 6e-2
# From the second layer on, keys and values differ by float32 rounding, which can move one across
# the border between two codes: one element is then off by a whole step (here up to 0.5) and is
# seen through a softmax weight of about 1/100, one layer below the logits.
LOGITS_CODE_FLIP = 1e-3
# One attention in float32 against float64 on the same decoded values.
ATTENTION_FP32 = 2e-6


def logits(dtype: torch.dtype) -> float:
    """For logits of a tiny model computed in ``dtype``."""
    return LOGITS_FP32 if dtype == torch.float32 else LOGITS_BF16
