"""Every kernel that the presets need, compiled for two GPU generations on a machine without one."""

from __future__ import annotations

import pytest

from kvpass._torch import FakeTensorMode
from kvpass.errors import KernelError
from lowering import inspection
from lowering.launch import Launch
from lowering.layer import layer_launches

PRESETS = {
    "fp": ("fp", "fp"),
    "kivi-2bit": ("int2.channel32/window=0,flush=128", "int2.token32/window=128,flush=1"),
    "kivi-4bit": ("int4.channel32/window=0,flush=128", "int4.token32/window=128,flush=1"),
}
# Each head dimension and each generation once.
TARGETS = [(64, 80), (128, 90)]
# The most that a thread can have.
MOST_REGISTERS = 255


def launches(plans: tuple[str, str], head_dim: int) -> list[Launch]:
    """What one layer launches in a prompt and in a decode step."""
    with FakeTensorMode():
        return layer_launches(*plans, key_dim=head_dim, value_dim=head_dim, heads_per_group=4)


@pytest.mark.parametrize(("head_dim", "capability"), TARGETS)
@pytest.mark.parametrize("preset", PRESETS)
def test_preset_compiles_without_spills(preset, head_dim, capability, capsys):
    reports = [
        inspection.inspect_launch(x, capability) for x in launches(PRESETS[preset], head_dim)
    ]
    with capsys.disabled():
        for r in reports:
            print(f"\n{preset} D={head_dim} sm_{capability} {r.name}: {r.registers} registers, "
                  f"{r.shared} bytes shared", end="")  # fmt: skip
    for report in reports:
        assert not report.spills, report.name
        assert report.registers <= MOST_REGISTERS
    split = next(r for r in reports if r.name == "attention_split")
    assert split.tensor_core_instructions > 0
    assert split.instructions["I2F"] == 0


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
