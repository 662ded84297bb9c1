"""Every size of a launch: tiles, warps, splits. All are static; lengths stay on the device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from triton_templates import Layout

# Query rows that a program holds: the N axis of the tensor-core product.
_MAX_COLUMNS = 16
# Query rows of a KV head: each `_MAX_COLUMNS` of them read the packed tokens once more. For more
# rows it is cheaper to decode the tokens once.
MAX_ROWS = 128
# Multiprocessors to fill where the device cannot be asked: fake tensors on a machine without a GPU.
_DEFAULT_PROCESSORS = 132
# Programs to have in flight on each multiprocessor: of one warp, with as many registers as KIVI's
# kernels have. More would wait for these to end.
_OCCUPANCY = 8
_MAX_SPLITS = 128
# Packed tokens of a program, at least. On an H200, 4,096 tokens of batch 1 in 32 splits take
# 10.9 us, in 16 (two tiles each) 13.8 us, in 64 (more to merge) 12.1 us.
_SPLIT_TOKENS = 128
# A program of the exact window walks about this many tokens: one tile, where there are programs to
# spare. They begin first, and packed tokens wait for them: 4 us of 107 on an H200 for four tiles.
_EDGE_TILE = 32
# Programs of one window, at most, and of a window that grows, whatever it holds.
_MAX_EDGES = 8
# Tokens of tiles to try: at least the rows of a tensor-core product.
_MIN_TILE, _MAX_TILE = 16, 128
_MAX_WARPS = 4
# Channels for which one warp has the registers, with up to 16 query rows.
_WARP_LANES = 128
# Tokens that one program of `pack` and `append` encodes, where no group of tokens asks for more.
_ENCODE_TOKENS = 16
# Tokens that one program copies as they are.
COPIED_TOKENS = 64


@dataclass(frozen=True)
class AttentionSizes:
    """Sizes of a decode attention launch.

    Attributes:
        tile: tokens of one step over packed tokens.
        part: tokens of a tile that are read together, of one group; the parts of a tile share one
            softmax step.
        edge_tile: tokens of one step over tokens that are exact in keys or values.
        columns: query rows of a program, 8 or 16.
        splits: programs that share the packed tokens of one KV head.
        edge_splits: programs that share each other combination of packed and exact.
        warps: warps of a program.
        stages: steps whose reads are in flight, counting the one that is computed.
    """

    tile: int
    part: int
    edge_tile: int
    columns: int
    splits: int
    edge_splits: int
    warps: int
    stages: int = 2


def attention_sizes(
    k: Layout,
    v: Layout,
    rows: int,
    pairs: int | torch.SymInt,
    capacity: int | torch.SymInt,
    query: torch.Tensor,
) -> AttentionSizes:
    """The sizes of a launch, whatever a symbolic ``pairs`` or ``capacity`` is: to look at it would
    specialise the graph on it.

    Args:
        k, v: layouts of keys and values.
        rows: query rows of a KV head.
        pairs: batch times KV heads.
        capacity: tokens that there is room for.
        query: the query; its dtype and device count.
    """
    columns = 8 if rows <= 8 else _MAX_COLUMNS
    wide = query.dtype == torch.float32
    if dequant_first(k, v):
        # Keys are decoded in registers, and outliers compared with all of their channels.
        tile = 32
    elif v.lanewise or (wide and k.identity and v.identity):
        # Scales of every channel, or exact tokens of twice the bytes.
        tile = 32
    else:
        tile = 128 if k.bits == v.bits == 2 and columns == 8 else 64
    part = _part(tile, k)
    if columns > 8 or dequant_first(k, v):
        # No registers for the scores of several parts.
        tile = part
    return AttentionSizes(
        tile=tile,
        part=part,
        edge_tile=_edge_tile(part, k, v),
        columns=columns,
        splits=_splits(pairs, capacity, query.device),
        edge_splits=_edge_splits(k, v, pairs, query.device),
        warps=_warps(max(k.exact_lanes, v.exact_lanes), columns, wide),
    )


def attention_candidates(table: AttentionSizes, k: Layout, v: Layout) -> list[AttentionSizes]:
    """Sizes worth measuring: the table's first, then at most seven neighbours, each with one size
    halved or doubled, or reading one step further ahead."""
    found = [table]
    for tile in (table.tile // 2, table.tile * 2):
        if _MIN_TILE <= tile <= _MAX_TILE:
            part = _part(tile, k)
            tile = part if dequant_first(k, v) else tile
            found.append(replace(table, tile=tile, part=part, edge_tile=_edge_tile(part, k, v)))
    for warps in (table.warps // 2, table.warps * 2):
        if 1 <= warps <= _MAX_WARPS:
            found.append(replace(table, warps=warps))
    for splits in (table.splits // 2, table.splits * 2):
        if 1 <= splits <= _MAX_SPLITS:
            found.append(replace(table, splits=splits))
    return [*found, replace(table, stages=table.stages + 1)]


def dequant_first(k: Layout, v: Layout) -> bool:
    """Whether attention decodes tokens before it multiplies them."""
    return k.dequant_first or v.dequant_first


def _part(tile: int, k: Layout) -> int:
    return min(tile, k.group) if k.by_channel and not k.static_ranges else tile


def _edge_tile(part: int, k: Layout, v: Layout) -> int:
    # Scales of every channel leave fewer registers, and so do sums that are half padding, and keys
    # both decoded and exact.
    few = v.lanewise or v.bits == 1 or dequant_first(k, v)
    return min(16 if few else _EDGE_TILE, part)


def _edge_splits(k: Layout, v: Layout, pairs: int | torch.SymInt, device: torch.device) -> int:
    if k.grows or v.grows:
        return _MAX_EDGES
    most = _MAX_EDGES
    if isinstance(pairs, int):
        # Each of four combinations of packed and exact has so many.
        most = min(most, _OCCUPANCY * _processors(device) // (4 * max(1, pairs)))
    return max(1, min(most, max(k.ring, v.ring) // _EDGE_TILE))


def _warps(lanes: int, columns: int, wide: bool) -> int:
    """As few as have the registers: one warp needs no barrier and no exchange through memory."""
    if wide:
        # Products in fp32 are not for tensor cores and keep whole operands in registers.
        return _MAX_WARPS
    return 1 if lanes <= _WARP_LANES else columns // 4


def encode_tokens(layout: Layout) -> int:
    """Tokens that one program of `pack` and `append` encodes."""
    return max(_ENCODE_TOKENS, layout.group) if layout.by_channel else _ENCODE_TOKENS


def decode_tokens(layout: Layout) -> int:
    """Tokens that one program of `unpack` decodes or copies; they lie in one group of tokens."""
    # Wide heads in fp32 would take all registers.
    tokens = COPIED_TOKENS if layout.exact_lanes <= _WARP_LANES else COPIED_TOKENS // 2
    return _part(tokens, layout)


def _splits(pairs: int | torch.SymInt, capacity: int | torch.SymInt, device: torch.device) -> int:
    wanted = _OCCUPANCY * _processors(device)
    if isinstance(pairs, int):
        wanted //= max(1, pairs)
    most = _MAX_SPLITS
    if isinstance(capacity, int):
        most = min(most, capacity // _SPLIT_TOKENS)
    return max(1, min(wanted, most))


def _processors(device: torch.device) -> int:
    if device.type != "cuda" or not torch.cuda.is_available():
        return _DEFAULT_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
