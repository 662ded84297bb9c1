"""Every tolerance of the tests, each with its reason. Absolute, on values of the order of one."""

from __future__ import annotations

import torch

# The same decoded values through two dense attentions: float32 sums in another order, two layers
# deep.
LOGITS_FP32 = 5e-6
# As above, through kernels that read codes as numbers between 1 and 2 and fold scales into the
# query: scores of these peaked models reach 60, of which float32 sums in another order keep 1e-5,
# and weights follow them one to one.
LOGITS_CODES_FP32 = 2e-5
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
# Normal numbers rotated and rotated back: two sums of a few products in float32.
ROTATED = 4e-6
# One layer of an encoder in float32, a text alone or in a padded batch: values of the order of one.
ENCODED = 1e-6
# Relative error of attention in C++ against float64 on the same decoded values.
CPP_ATTENTION = {
    # Sums of a few hundred products in float32 that cancel in part (codes are read as numbers
    # between 1 and 2), and an exponential that is good to 2e-7.
    torch.float32: 4e-6,
    # Sums are in float32; the output is rounded to 8 bits (2**-9) or 11 bits (2**-12), on average
    # half of that. Where tiles multiply bfloat16, so are decoded tokens and weights, whose errors
    # differ from token to token.
    torch.bfloat16: 3e-3,
    torch.float16: 4e-4,
}
# Relative error of linear layers in C++ against float64.
CPP_LINEAR = {
    # Sums of thousands of products in float32, in 16 parts and more.
    torch.float32: 5e-7,
    # Sums are in float32; the output is rounded to 8 bits (2**-9) or 11 bits (2**-12), on average
    # half of that.
    torch.bfloat16: 3e-3,
    torch.float16: 4e-4,
}
# Relative error of attention in Triton against float64 on the same decoded values.
TRITON_ATTENTION = {
    # Codes are exact; query times scale, and weight times scale, are rounded to fp16 (2**-11 each).
    torch.float16: 1.5e-3,
    # The output itself is rounded to bf16 (2**-9), on top of the above.
    torch.bfloat16: 5e-3,
    # Products over packed tokens still have fp16 operands.
    torch.float32: 1.5e-3,
}
# Exact tokens of a float32 model are multiplied in float32.
TRITON_EXACT_FP32 = 2e-6


def logits(dtype: torch.dtype, recipe: str = "fp") -> float:
    """For logits of a tiny model computed in ``dtype`` with a cache of this recipe."""
    if dtype != torch.float32:
        return LOGITS_BF16
    return LOGITS_FP32 if recipe == "fp" else LOGITS_CODES_FP32
