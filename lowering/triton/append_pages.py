"""``kvpass::append_pages`` in Triton: what is due is encoded in place, of all requests at once."""

from __future__ import annotations

from torch import Tensor

from kvpass.format.parse import parse_plan
from kvpass.ops.pages import PagedStep, Pages
from lowering.codegen import load_kernels
from lowering.support import dense, unsupported_pages
from lowering.triton.heuristics import dequant_first, encode_tokens
from lowering.triton.launch import launch
from lowering.triton.layouts import (
    clipping,
    layout_of,
    unsupported_codec,
    unsupported_device,
    unsupported_dtype,
    unsupported_encoding,
)


def unsupported_reason(pages: list[Tensor], step: list[Tensor], plan: str) -> str | None:
    """Why the kernels decline these arguments of ``kvpass::append_pages``, or None."""
    new = pages[-1]
    return (
        unsupported_pages(pages, plan)
        or unsupported_in_pages(pages, plan)
        or unsupported_encoding(plan, int(new.shape[3]))
        or unsupported_dtype(new, "the new tokens")
        or unsupported_device(new)
    )


def unsupported_in_pages(pages: list[Tensor], plan: str) -> str | None:
    """Why no kernel works on tokens that are stored so, in pages of this size, or None."""
    _, _, page, dim = Pages.of(pages).exact.shape
    layout = layout_of(plan, dim)
    if reason := unsupported_codec(plan) or layout.unsupported_reason():
        return reason
    if layout.grows or dequant_first(layout, layout):
        return f"{plan} has to be decoded: that is not read in pages"
    if layout.by_channel and layout.sinks % layout.group:
        return f"the sinks of {plan} are not whole groups of tokens"
    if page % encode_tokens(layout):
        return f"pages of {page} tokens do not hold whole tiles of {encode_tokens(layout)}"
    return None


def codes_and_qparams(pages: Pages) -> tuple[Tensor, Tensor]:
    """What kernels get of packed tokens; those that are stored as they are have codes only."""
    return pages.stored[0], pages.stored[-1]


def append_pages(pages: list[Tensor], step: list[Tensor], plan: str) -> None:
    """As `kvpass.ops.append_pages.append_pages`, for arguments that are supported."""
    x, s, p = Pages.of(pages), PagedStep(*step), parse_plan(plan)
    new, (_, heads, page, dim) = dense(x.new), x.exact.shape
    layout, retention = layout_of(plan, dim), p.retention
    tokens, (clip, _) = encode_tokens(layout), clipping(p, None)
    stored = codes_and_qparams(x)
    # What was exact before the step, at most, and the new tokens.
    most = retention.pack_every + new.shape[2]
    kernels = load_kernels("append_pages", layout=layout)
    launch(
        kernels.append_pages, (s.requests.shape[0] * heads, 1 + -(-most // tokens)),
        *stored, x.exact, new, s.requests, s.tables, s.exact_tables,
        *(t.stride(0) for t in stored), new.stride(1), new.stride(2),
        s.tables.stride(0), s.exact_tables.stride(0), clip,
        KV_HEADS=heads, PAGE=page, WINDOW=retention.window, PACK_EVERY=retention.pack_every,
        TOKENS=tokens, CLIPPED=p.codec.clip != 1,
    )  # fmt: skip
