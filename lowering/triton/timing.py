"""Times of decode attention with given sizes, on a GPU and a cache filled at random."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from kvpass.format.parse import parse_plan
from kvpass.format.state import empty_state
from lowering.triton.heuristics import AttentionSizes
from lowering.triton.launch import Launch, record_launches
from lowering.triton.tuning import Workload

# `lowering.triton.attention.attend`: sizes, then the arguments of the op.
Attend = Callable[..., Tensor]
States = tuple[list[Tensor], list[Tensor]]

_ROUNDS = 20
# Calls of one CUDA graph, so that the cost of a replay beside the kernels does not show.
_MIN_CALLS, _MAX_CALLS = 4, 256
# A scale and a minimum of 2**-4 each, as halves and as fp8-e4m3.
_PARAMS = {torch.int32: 0x2C002C00, torch.int16: 0x1818}
# Norm of the difference of two results over the norm of one. The output's rounding to bf16 is
# 2**-9, that of weights to fp16 2**-11; a wrong result is off by more than 0.1.
_TOLERANCE = 2e-2


def time_attention(
    attend: Attend, workload: Workload, candidates: Sequence[AttentionSizes], device: torch.device
) -> list[float | str]:
    """Median milliseconds of a call with each of these sizes, which take turns.

    Calls go through buffers that together exceed the last-level cache twice, in CUDA graphs, so
    that kernels are measured without their launches. Sizes whose kernels do not compile, or whose
    result differs from those before, have a reason in place of a time.

    Raises:
        RuntimeError: if the device cannot be used, or its memory does not hold the buffers.
    """
    with torch.cuda.device(device), torch.no_grad():
        states, q = _states(workload, device), query(workload, device)
        recorded = [record(attend, workload, sizes, q, states) for sizes in candidates]
        # One call has all the kernels. Triton's compiler leaves Python to other threads.
        calls = [launches[: len(launches) // len(states)] for launches, _ in recorded]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            reasons = list(pool.map(partial(_compile, device=device), calls))
        expected: Tensor | None = None
        clocks: list[Callable[[], float] | str] = []
        for (launches, out), reason in zip(recorded, reasons, strict=True):
            reason = reason or _attempt(launches) or _difference(out, expected)
            if reason is None and expected is None:
                expected = out
            clocks.append(_clock(launches, len(states)) if reason is None else reason)
        times: list[list[float]] = [[] for _ in clocks]
        for _ in range(_ROUNDS):
            for clock, found in zip(clocks, times, strict=True):
                if not isinstance(clock, str):
                    found.append(clock())
    return [
        clock if isinstance(clock, str) else statistics.median(found)
        for clock, found in zip(clocks, times, strict=True)
    ]


def query(workload: Workload, device: torch.device) -> Tensor:
    """A random query ``[B, rows * Hkv, 1, D]``."""
    shape = (workload.batch, workload.kv_heads * workload.rows, 1, workload.key_dim)
    generator = torch.Generator(device).manual_seed(0)
    return torch.empty(shape, dtype=workload.dtype, device=device).normal_(generator=generator)


def filled_state(
    plan: str, dim: int, workload: Workload, device: torch.device, seed: int
) -> list[Tensor]:
    """The state after a prompt of ``workload.capacity`` tokens, with random codes."""
    p, generator = parse_plan(plan), torch.Generator(device).manual_seed(seed)
    shape = (workload.batch, workload.kv_heads, workload.capacity, dim)
    # Only its shape is looked at.
    tokens = workload.capacity - p.skipped(workload.capacity)
    new = torch.empty(1, dtype=workload.dtype, device=device).expand(shape)
    packed = p.packed(tokens)
    state = empty_state(new, p, packed)
    for field, tensor in zip(p.layout.own, state.tensors, strict=True):
        if field.exact:
            tensor.normal_(generator=generator)
        elif field.name == "codes":
            tensor.random_(-(1 << 15), 1 << 15, generator=generator)
        elif field.name == "qparams":
            tensor.fill_(_PARAMS[tensor.dtype])
        elif field.name == "outliers":
            # Values of at most 2**-14, anywhere.
            tensor.random_(0, workload.kv_heads * dim, generator=generator).add_(0x04000000)
    state.segment_ends[:, 0] = p.sinks
    state.segment_ends[:, -2:-1] = p.sinks + packed
    state.segment_ends[:, -1] = tokens
    if p.rope is None:
        return state.tensors
    cos_sin = new.new_empty((1, state.capacity, p.rope.channels))
    return [*state.tensors, cos_sin.uniform_(-1, 1, generator=generator)]


def _states(workload: Workload, device: torch.device) -> list[States]:
    """So many states that they exceed the last-level cache twice, within a quarter of the free
    memory."""
    made: list[States] = []
    wanted = 2 * torch.cuda.get_device_properties(device).L2_cache_size
    free, size = torch.cuda.mem_get_info(device)[0] // 4, 0
    while not made or (len(made) < _MAX_CALLS and len(made) * size < min(wanted, free)):
        seed = 2 * len(made)
        keys = filled_state(workload.k_plan, workload.key_dim, workload, device, seed)
        values = filled_state(workload.v_plan, workload.value_dim, workload, device, seed + 1)
        made.append((keys, values))
        size = sum(t.nbytes for t in (*keys, *values))
    return made


def record(
    attend: Attend,
    workload: Workload,
    sizes: AttentionSizes,
    q: Tensor,
    states: Sequence[States],
) -> tuple[list[Launch], Tensor]:
    """The launches of one call for each state, and the result of the first, not yet computed."""
    scale, plans = workload.key_dim**-0.5, (workload.k_plan, workload.v_plan)
    with record_launches() as launches:
        outs = [attend(sizes, q, keys, values, None, scale, *plans) for keys, values in states]
    return launches, outs[0]


def _compile(launches: Sequence[Launch], device: torch.device) -> str | None:
    """Why the kernels do not compile, or None. Called in threads."""
    try:
        with torch.cuda.device(device):
            for launch in launches:
                launch.compile()
    # Triton raises many kinds of errors.
    except Exception as error:
        return _sentence(error)
    return None


def _attempt(launches: Sequence[Launch]) -> str | None:
    """Runs the kernels; why that fails, a program being too large for the device, or None."""
    try:
        _run(launches)
        torch.cuda.synchronize()
    except Exception as error:
        return _sentence(error)
    return None


def _sentence(error: Exception) -> str:
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}"


def _run(launches: Sequence[Launch]) -> None:
    for launch in launches:
        launch.run()


def _difference(out: Tensor, expected: Tensor | None) -> str | None:
    """Why the result differs from that of other sizes, or None."""
    if expected is None:
        return None
    wanted = expected.double()
    error = float((out.double() - wanted).norm() / wanted.norm())
    # A NaN compares false.
    return None if error <= _TOLERANCE else f"the result differs from that of others by {error:.1e}"


def _clock(launches: Sequence[Launch], calls: int) -> Callable[[], float]:
    """Milliseconds of one call, by CUDA events around a graph of all of them."""
    repeats = -(-_MIN_CALLS // calls)
    graph = torch.cuda.CUDAGraph()
    # Other threads of the process may go on using the GPU.
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
        for _ in range(repeats):
            _run(launches)
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def clock() -> float:
        # The graph reads tensors that only the launches hold.
        assert launches
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / (repeats * calls)

    return clock
