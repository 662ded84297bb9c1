"""Codebooks in groups of a part of a head are left to the reference."""

from __future__ import annotations

from lowering.cpp.constants import unsupported_writing

PLAN = "nuq2.token{}.codebook-1.0,-0.3,0.3,1.0/window=0,pack_every=1"


def test_a_codebook_is_written_in_groups_of_whole_heads():
    assert unsupported_writing(PLAN.format(64), 64) is None
    reason = "a codebook is written in groups of whole heads, not of 8 channels"
    assert unsupported_writing(PLAN.format(8), 64) == reason
