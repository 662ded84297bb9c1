"""Whether tensor cores compute exactly with codes as half-precision subnormal numbers.

The attention kernels mask a word of codes and use its bits as a half, which is
``code * 2**(position - 24)``. Hardware that flushes subnormals would answer zeros. Imports Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TOKENS, _WORDS, _COLUMNS = 64, 16, 16


def _dot_of_codes(
    words: tl.tensor,
    q: tl.tensor,
    out: tl.tensor,
    MASK: tl.constexpr,  # noqa: N803
    TOKENS: tl.constexpr,  # noqa: N803
    WORDS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
) -> None:
    tokens = tl.arange(0, TOKENS)[:, None]
    columns = tl.arange(0, COLUMNS)[None, :]
    tile = tl.load(words + tokens * WORDS + tl.arange(0, WORDS)[None, :])
    codes = (tile & MASK).to(tl.float16, bitcast=True)
    rows = tl.load(q + tl.arange(0, WORDS)[:, None] * COLUMNS + columns)
    tl.store(out + tokens * COLUMNS + columns, tl.dot(codes, rows))


def subnormal_differences(bits: int, position: int, device: torch.device, warps: int = 1) -> int:
    """Elements of a product of codes and small integers that are not exact; 0 is right.

    Args:
        bits: of a code.
        position: of a code's lowest bit in the half's mantissa of 10 bits.
        device: a GPU, or a CPU in Triton's interpreter.
        warps: of the program; four share a product in other instructions than one.
    """
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(1 << 15), 1 << 15, (_TOKENS, _WORDS), generator=generator)
    q = torch.randint(-8, 9, (_WORDS, _COLUMNS), generator=generator)
    mask = ((1 << bits) - 1) << position
    out = torch.empty(_TOKENS, _COLUMNS, device=device)
    kernel = triton.jit(_dot_of_codes)
    kernel[(1,)](
        words.to(torch.int16).to(device), q.to(torch.float16).to(device), out,
        MASK=mask, TOKENS=_TOKENS, WORDS=_WORDS, COLUMNS=_COLUMNS, num_warps=warps,
    )  # fmt: skip
    expected = (words & mask).double() @ q.double()
    return int((out.cpu().double() * 2**24 != expected).sum())
