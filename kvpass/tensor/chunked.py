"""`ChunkedKV`: a cache tensor whose prompts have chunks of different bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvpass.format.chunked_plan import ChunkedPlan
from kvpass.format.retention import MAX_STEP
from kvpass.format.state import State
from kvpass.ops.chunks import decoded_chunk, positions
from kvpass.tensor.packed import PackedKV
from kvpass.tensor.storage import PackedStorage


class ChunkedKV(PackedKV):
    """A `PackedKV` with a segment for each codec of its plan, see `kvpass.ops.chunks`.

    Attributes:
        codes, codes0, qparams0, ...: exact tokens, and what each codec stores.
        positions0, ..., positions: of the tokens in each segment; all layers share their memory.
        written: how many exact tokens a row may have.
    """

    plan: ChunkedPlan

    @property
    def bits_per_element(self) -> float:
        """See `PackedKV.bits_per_element`."""
        self.check()
        counts = self.counts.float().mean(0).tolist()
        exact, bits = 8 * self.dtype.itemsize, 0.0
        for codec, count in zip(self.plan.codecs, counts, strict=True):
            each = codec.bits_per_element(self.shape[3], self.shape[1])
            bits += (exact if codec.identity else each) * count
        ends = 8 * self.segment_ends.nbytes / self.shape[:2].numel() / self.shape[3]
        return float((bits + ends) / max(sum(counts), 1))

    @property
    def counts(self) -> Tensor:
        """How many tokens each segment holds of each row, int32 ``[B, segments]``."""
        return self.segment_ends

    def _reserve_packed(self, new: int) -> None:
        """A prompt's tokens get room where it is known which of them are exact."""
        self._reserve_capacity(self.written + (new if new <= MAX_STEP else 0))

    def reserve_segments(self, needed: Sequence[int], tile: int) -> None:
        """Makes room for so many tokens in each segment, in whole tiles."""
        for segment, count in enumerate(needed):
            for name in self.plan.segment_fields(segment):
                field, tokens = self.plan.layout[name], -(-count // tile) * tile
                if field.room(getattr(self, name)) < tokens:
                    self._move(field, tokens)

    def joins(self, others: Sequence[PackedStorage]) -> bool:
        """True: each row has boundaries of its own."""
        return True

    def undo(self, before: dict[str, Tensor]) -> None:
        """See `PackedKV.undo`; a decode step counts exact tokens only."""
        if before:
            super().undo(before)
        else:
            self.segment_ends[:, -1] = self.shape[2] - self.segment_ends[:, :-1].sum(1)

    def cropped(self, tokens: int, total: int) -> tuple[State, int, None]:
        """See `PackedKV.cropped`.

        What is left of a chunk that is cut through is decoded, and exact from then on, behind the
        other exact ones.
        """
        plan, last = self.plan, len(self.plan.chunk_codecs)
        left = [p.masked_fill(p >= tokens, -1) for p in positions(self.named, plan)]
        counts: list[list[int]] = torch.stack([(p >= 0).sum(1) for p in left], dim=1).tolist()
        most = max((row[-1] for row in counts), default=0) + plan.chunk
        named = {name: t.clone() for name, t in zip(plan.layout.names, self.state, strict=True)}
        exact = named["codes"]
        if exact.shape[2] < most:
            exact = named["codes"] = plan.layout["codes"].moved(exact, most)
        rows, slots = exact.shape[0], exact.shape[2]
        known = named["positions"] = named["positions"].new_full((rows, slots), -1)
        known[:, : left[-1].shape[1]] = left[-1]
        state = State(list(named.values()), plan)
        for row, count in enumerate(counts):
            for segment in range(last):
                if cut := count[segment] % plan.chunk:
                    first, end = count[segment] - cut, count[-1] + cut
                    chunk = decoded_chunk(state, plan, segment, row, first)
                    exact[row, :, count[-1] : end] = chunk[:, :cut].to(exact.dtype)
                    known[row, count[-1] : end] = left[segment][row, first : first + cut]
                    count[segment], count[-1] = first, end
        ends = [plan.row_ends(count, tokens) for count in counts]
        state.segment_ends.copy_(torch.tensor(ends, dtype=torch.int32).view_as(state.segment_ends))
        return state, max((row[-1] for row in counts), default=0), None


torch.serialization.add_safe_globals([ChunkedKV, ChunkedPlan])
