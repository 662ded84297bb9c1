"""Every kernel that the presets need, compiled for two GPU generations on a machine without one."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from kvpass._torch import FakeTensorMode
from kvpass._torch_gpu import simulated_gpu
from kvpass.cli import options
from kvpass.errors import KernelError
from kvpass.ops.pack import pack_fake
from lowering.triton import append_pages, attention_pages, inspection, layouts, pack, unpack
from lowering.triton.launch import Launch, record_launches
from lowering.triton.layer import layer_launches
from tests.pool import Pool

PRESETS = {
    "fp": ("fp", "fp"),
    "kivi-2bit": ("int2.channel32/window=0,pack_every=128", "int2.token32/window=128,pack_every=1"),
    "kivi-4bit": ("int4.channel32/window=0,pack_every=128", "int4.token32/window=128,pack_every=1"),
}
# (More of attention: test_gates.py; other head dimensions: below, and in test_tuning.py.)
TARGETS = {"fp": 90, "kivi-4bit": 80}
# The most that a thread can have.
MOST_REGISTERS = 255


# What a layer with a sliding window, a cap and sinks needs beside its `PRESETS`.
KEEP = "/window_size=1023"
VARIANT = {"causal": True, "window": 1024, "softcap": 30.0, "with_sinks": True}


def launches(plans: tuple[str, str], head_dim: int, **variant: Any) -> list[Launch]:
    """What one layer launches in a prompt and in a decode step."""
    dims = {"key_dim": head_dim, "value_dim": head_dim}
    return layer_launches(*plans, **dims, heads_per_group=4, **variant)


def reports_without_spills(
    plans: tuple[str, str], head_dim: int, capability: int, **variant: Any
) -> list[inspection.KernelReport]:
    """What a layer's kernels become; those of attention multiply on tensor cores."""
    reports = [
        inspection.inspect_launch(x, capability) for x in launches(plans, head_dim, **variant)
    ]
    for report in reports:
        assert not report.spills, report.name
        assert report.registers <= MOST_REGISTERS
        if report.name == "attention_split":
            assert report.tensor_core_instructions > 0
    return reports


@pytest.mark.parametrize(
    ("preset", "sliding", "head_dim", "capability"),
    [*((preset, False, 128, capability) for preset, capability in TARGETS.items()),
     ("fp", True, 64, 80)],
)  # fmt: skip
def test_preset_compiles_without_spills(preset, sliding, head_dim, capability, capsys):
    plans = tuple(plan + KEEP if sliding else plan for plan in PRESETS[preset])
    variant = VARIANT if sliding else {}
    reports = reports_without_spills(plans, head_dim, capability, **variant)
    with capsys.disabled():
        for r in reports:
            print(f"\n{preset} D={head_dim} sm_{capability} {r.name}: {r.registers} registers, "
                  f"{r.shared} bytes shared", end="")  # fmt: skip
    split = next(r for r in reports if r.name == "attention_split")
    assert not any(loop["I2F"] for loop in inspection.loops(split.sass))
    # A ring's first slot is found once, with a division, which goes through floats.
    assert sliding or split.instructions["I2F"] == 0


def test_clipped_heads_of_64_compile_without_spills():
    keys = "int2.token64.fp8.clip0.9/sinks=5,window=128,pack_every=1"
    values = "int1.5.token64.ternary_in_2bit.fp8/sinks=5,window=128,pack_every=1"
    reports_without_spills((keys, values), 64, 80)


@pytest.mark.parametrize(("head_dim", "capability"), [(128, 90), (80, 80)])
def test_new_keys_and_the_query_are_rotated_without_spills(head_dim, capability):
    plans = PRESETS["kivi-2bit"][0], "fp"
    append = next(
        x
        for x in launches(plans, head_dim, keys_rotated=True)
        if x.kernel.__name__ == "append_both"
    )
    report = inspection.inspect_launch(append, capability)
    assert not report.spills
    assert report.instructions["FFMA"] > 0


def test_keys_before_a_rotary_embedding_of_neighbours():
    """A few bytes of stack hold what loops over the last tokens share."""
    keys = "int4.channel32/window=0,pack_every=128/rope=neighbours0-64"
    split = next(x for x in launches((keys, PRESETS["kivi-4bit"][1]), 64) if x.step_elements)
    report = inspection.inspect_launch(split, 90)
    assert report.stack + report.local <= 16
    assert inspection.matrix_products(report.main_loop) > 0


@pytest.mark.parametrize(("codec", "head_dim", "capability"), [
    ("int2.channel128", 80, 80), ("int4.token16", 80, 90), ("int8.token32", 96, 80),
    ("int8.channel64", 256, 90),
])  # fmt: skip
def test_unpack_compiles_without_spills(codec, head_dim, capability):
    """Pad lanes, a scale for each lane, and the widest tiles, in fp32."""
    report = inspection.inspect_launch(unpack_launch(codec, head_dim, torch.float32), capability)
    assert not report.spills
    assert report.instructions["I2F"] == report.instructions["I2FP"] == 0


@pytest.mark.parametrize("capability", options.TARGETS.values())
def test_unpack_rounds_to_bf16(capability):
    """To nearest, as the reference does; Triton's interpreter, which truncates, cannot show it."""
    report = inspection.inspect_launch(
        unpack_launch("int4.channel32", 64, torch.bfloat16), capability
    )
    roundings = set(re.findall(r"F2FP\S*", report.sass))
    assert roundings
    assert not [name for name in roundings if ".RZ" in name or "BF16" not in name]


def unpack_launch(codec: str, head_dim: int, dtype: torch.dtype) -> Launch:
    """The launch that decodes a state of 4097 tokens."""
    plan = f"{codec}/window=0,pack_every=128"
    with FakeTensorMode(), record_launches() as recorded:
        x = torch.empty(1, 8, 4097, head_dim, dtype=dtype, device="cuda")
        state = pack_fake(x, plan)
        assert unpack.unsupported_reason(state, 4097, plan, dtype) is None
        unpack.unpack(state, 4097, plan, dtype)
    return recorded[0]


def test_long_prompts_fit_into_a_grid():
    """CUDA takes 65,535 programs in all but the first dimension of a grid."""
    tokens = 4_300_000
    with FakeTensorMode(), record_launches() as recorded:
        for plan in PRESETS["kivi-2bit"]:
            x = torch.empty(1, 8, tokens, 64, dtype=torch.float16, device="cuda")
            pack.pack(x, plan)
            unpack.unpack(pack_fake(x, plan), tokens, plan, x.dtype)
    assert len(recorded) == 4
    for launch in recorded:
        assert launch.grid[0] >= tokens // 128
        assert all(size < 65_536 for size in launch.grid[1:])
    wide = torch.empty(8192, 8, 4, 64, dtype=torch.float16, device="meta")
    assert layouts.unsupported_heads(wide) == "the batch has 65536 heads; the kernels take 65535"


def test_the_disassembler_is_missing(monkeypatch):
    inspection.tool.cache_clear()
    monkeypatch.setattr("triton.__file__", "/nowhere/triton/__init__.py")
    with pytest.raises(KernelError, match=r"cuobjdump is missing in this build of Triton"):
        inspection.tool("cuobjdump")
    inspection.tool.cache_clear()


def test_a_kernel_that_does_not_compile_is_named():
    recorded = launches(PRESETS["fp"], 64)[-1]
    broken = Launch(recorded.kernel, recorded.arguments | {"SPLITS_PADDED": 3}, {})
    with pytest.raises(KernelError, match=r"Kernel attention_merge in .*\.py does not compile"):
        inspection.inspect_launch(broken, 90)


def test_calibrated_factors_of_clipping_are_a_tensor():
    """One of the layer's own, with any numbers: they change no kernel."""
    plan = "int2.token64.fp8.clip{},0.5,0.6,0.7,0.8,0.9,1,1/sinks=5,window=128,pack_every=1"
    kernels = []
    for first in (0.5, 0.9):
        launches = layer_launches(
            *[plan.format(first)] * 2, key_dim=64, value_dim=64, heads_per_group=1
        )
        clips = [v for x in launches for n, v in x.arguments.items() if n.endswith("clip")]
        assert [type(clip).__name__ for clip in clips] == ["FakeTensor"] * 4
        kernels.append([x.kernel for x in launches])
    assert kernels[0] == kernels[1]


def test_pages():
    """Of a step of eight requests: tokens are read ahead of their use, within the budget of 2.9
    instructions per element."""
    plans, page, heads, dim, count = PRESETS["kivi-2bit"], 128, 8, 128, 8
    pool = Pool(plans, heads, dim, page, torch.bfloat16, pages=count)

    def on_gpu(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)

    with simulated_gpu(90) as fake, fake, torch.device("cuda"), record_launches() as made:
        new = torch.empty(1, count, heads, dim, dtype=torch.bfloat16).transpose(1, 2)
        numbers = [torch.empty(count, n, dtype=torch.int32) for n in (3, 32, 32, 2)]
        sides = [
            [*map(on_gpu, (*side, exact)), new]
            for side, exact in zip(pool.sides, pool.exact, strict=True)
        ]
        for side, plan in zip(sides, plans, strict=True):
            append_pages.append_pages(side, numbers, plan)
        q = torch.empty(1, count, 32, dim, dtype=torch.bfloat16).transpose(1, 2)
        out = torch.empty(count, 32, dim, dtype=torch.bfloat16)
        attention_pages.attention_pages(out, q, *sides, numbers, 0.1, *plans)
    reports = {r.name: r for r in (inspection.inspect_launch(x, 90) for x in made)}
    split = reports.pop("attention_split")
    assert split.tensor_core_instructions > 0
    assert split.main_loop["LDGSTS"] > 0
    # Of a contiguous cache 2.06; each tile looks its page up.
    assert split.per_element <= 2.2
    # A few pointers are spilled, but not where packed tokens are read.
    assert split.stack <= 32
    assert split.main_loop["LDL"] + split.main_loop["STL"] == 0
    assert reports.keys() == {"append_pages", "attention_merge"}
    assert not any(r.spills for r in reports.values())
