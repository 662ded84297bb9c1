"""What it is worth to reorder chunks by their bits (Cocktail's second module).

    python -m examples.chunk_switching --tokens 32768    # on a CPU, half a minute

Times one decode step's attention over chunks of 2, 4 and 16 bits: as ``cocktail`` stores them, one
segment for each, and in the order of the text, where the same kernels are called anew wherever the
bits change. Beside them `kivi-4bit` and dense attention. All are checked first.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from examples import one_sentence
from kvpass.bench.attention import AttentionRun, attention_section
from kvpass.bench.contenders import (
    TOLERANCE,
    Case,
    copies,
    decoded_rows,
    dense_attention,
    dense_contenders,
    packed_contender,
)
from kvpass.bench.plans import layer_plan, packed_states, random_bits
from kvpass.bench.timing import Contender, copy_bandwidth, measure, relative_error
from kvpass.format.chunked_plan import ChunkedPlan
from kvpass.format.codec import FP
from kvpass.format.quantize import encode
from kvpass.format.retention import RetentionPolicy
from kvpass.format.tensor_plan import TensorPlan
from kvpass.ops.attention import AttentionArguments
from kvpass.plan import LayerPlan
from lowering.cpp.attention import attend_segment


@dataclass(frozen=True)
class Run:
    """Chunks that lie side by side in the text and have equal bits.

    Attributes:
        plans: printed plans of keys and of values.
        tensors: for keys and for values: codes, and qparams where tokens are packed.
        positions: where the tokens stand, int32 ``[1, n]``.
    """

    plans: tuple[str, str]
    tensors: tuple[list[Tensor], list[Tensor]]
    positions: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(t.nbytes for x in self.tensors for t in x)

    def clone(self) -> Run:
        """A copy on memory of its own."""
        keys, values = ([t.clone() for t in x] for x in self.tensors)
        return replace(self, tensors=(keys, values), positions=self.positions.clone())


def runs_of(plan: LayerPlan, k: Tensor, v: Tensor) -> list[Run]:
    """The runs of a text; all exact tokens are the last one."""
    tokens, keys = k.shape[2], plan.keys
    assert isinstance(keys, ChunkedPlan)
    (bits,) = random_bits(keys, 1, tokens).bits
    exact, found, end = torch.ones(tokens, dtype=torch.bool), [], 0
    for width, chunks in groupby(bits):
        at, end = end, end + keys.chunk * len(list(chunks))
        if width != FP.bits:
            segment = keys.chunk_bits.index(width)
            found.append(packed_run(plan, segment, k[:, :, at:end], v[:, :, at:end], at))
            exact[at:end] = False
    dense = ([k[:, :, exact]], [v[:, :, exact]])
    return [*found, Run((str(FP), str(FP)), dense, exact.nonzero().T.int())]


def packed_run(plan: LayerPlan, segment: int, k: Tensor, v: Tensor, at: int) -> Run:
    """Tokens from position ``at`` on, in the bits of a segment."""
    codecs = plan.keys.codecs[segment], plan.values.codecs[segment]
    keys, values = (str(TensorPlan(c, RetentionPolicy(0, c.token_group))) for c in codecs)
    tensors = list(encode(codecs[0], k)), list(encode(codecs[1], v))
    positions = torch.arange(at, at + k.shape[2], dtype=torch.int32).unsqueeze(0)
    return Run((keys, values), tensors, positions)


def attend_in_order(q: Tensor, runs: Sequence[Run], segment_ends: Tensor, scale: float) -> Tensor:
    """One run after the other, in one softmax."""
    carried = q.new_empty((*q.shape[:3], q.shape[3] + 2), dtype=torch.float32)
    for number, run in enumerate(runs):
        # Where tokens are packed, the exact window is never read.
        window = [q] if len(run.tensors[0]) > 1 else []
        keys, values = ([*x, *window, segment_ends] for x in run.tensors)
        arguments = AttentionArguments(q, keys, values, None, scale, *run.plans)
        out = attend_segment(arguments, run.positions, len(runs), number, carried)
    return out


def in_order(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Contender:
    """The chunks of ``kvpass cocktail`` in the order of the text."""
    plan = layer_plan("cocktail", k, v)
    runs, plans = runs_of(plan, k, v), (str(plan.keys), str(plan.values))
    segment_ends = torch.tensor([[run.positions.shape[1] for run in runs]], dtype=torch.int32)
    decoded = decoded_rows(*packed_states(plan, k, v), *plans)
    expected = dense_attention(q, decoded, case.scale)
    size = sum(run.nbytes for run in runs)
    count = copies(size, case.device)
    return Contender(
        name="the same in the text's order",
        calls=[
            partial(attend_in_order, q, [run.clone() for run in runs], segment_ends, case.scale)
            for _ in range(count)
        ],
        error=partial(relative_error, expected=expected),
        tolerance=TOLERANCE[case.dtype],
        bytes_read=size,
        note=f"{len(runs)} runs, buffers: {count}",
        required=True,
    )


@torch.no_grad()
@one_sentence()
def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description="Attention over chunks, reordered or not.")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--rounds", type=int, default=100)
    args = parser.parse_args(argv)
    dtype = getattr(torch, args.dtype)
    case = Case(1, 32, 8, 128, args.tokens, dtype, torch.device("cpu"))
    q, k, v = case.query(0), case.cached(1), case.cached(2)
    contenders = [packed_contender(case, name, q, k, v) for name in ("cocktail", "kivi-4bit")]
    contenders += [in_order(case, q, k, v), *dense_contenders(case, q, k, v)]
    results = measure(contenders, args.rounds, case.device)
    run = AttentionRun(case, results, copy_bandwidth(case.device))
    print(attention_section(run))
    sys.exit(int(any(result.wrong for result in results)))


if __name__ == "__main__":
    main()
