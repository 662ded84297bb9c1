"""What a kernel becomes on a GPU, found out on any machine: compiled, disassembled and counted.

Triton brings the assembler and the disassembler for NVIDIA GPUs, so that no GPU is needed.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvpass._torch_sizes import divides
from kvpass.errors import KernelError
from lowering.support import interpreted
from lowering.triton.launch import ALIGNMENT, Launch
from triton_templates import Layout

_TYPES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.bool: "*i1",
}
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_LABEL = re.compile(r"\s*(\.L_\w+):")
_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(\S+)(.*?);")
_BRANCH = re.compile(r"`?\((\.L_\w+)\)")
_WARP = 32
# Triton's own number, where a launch gives none.
_DEFAULT_WARPS = 4
# Thread instructions a second (multiprocessors * 128 lanes * boost clock) and 90% of the memory's
# bytes a second, by compute capability: A100 80 GB SXM and H200 SXM, from NVIDIA's data sheets.
_RATES = {80: (19.5e12, 1.83e12), 90: (33.5e12, 4.3e12)}
_OUTLIER_BYTES = 4


@dataclass(frozen=True)
class KernelReport:
    """A compiled kernel.

    Attributes:
        name: the kernel function's name.
        capability: compute capability, e.g. 90.
        registers: registers of a thread.
        stack: bytes of a thread's stack; spilled registers are there.
        local: bytes of a thread's local memory outside the stack.
        shared: bytes of shared memory of a program.
        instructions: how often each machine instruction (without suffixes) stands in the code.
        main_loop: how often in the main loop: the one that copies to shared memory ahead of its
            use. Empty if there is none, or several.
        per_element: thread instructions of the main loop per element of keys and values that it
            reads; None where that is not counted.
        path: the generated file.
        sass: the disassembly.
    """

    name: str
    capability: int
    registers: int
    stack: int
    local: int
    shared: int
    instructions: Counter[str]
    main_loop: Counter[str]
    per_element: float | None
    path: Path
    sass: str

    @property
    def tensor_core_instructions(self) -> int:
        """Matrix products; ``HGMMA`` is what a group of four warps uses from sm_90 on."""
        return matrix_products(self.instructions)

    @property
    def spills(self) -> bool:
        """Whether registers did not suffice."""
        return self.stack > 0 or self.local > 0 or any(self.instructions[i] for i in ("LDL", "STL"))


def matrix_products(counts: Counter[str]) -> int:
    """Tensor-core instructions among these."""
    return counts["HMMA"] + counts["HGMMA"]


def rates(capability: int) -> tuple[float, float]:
    """Thread instructions, and bytes of memory at 90% of the bandwidth, that a GPU of this compute
    capability does a second."""
    return _RATES[capability]


def bytes_per_element(k: Layout, v: Layout, kv_heads: int = 1) -> float:
    """Bytes in memory per element of keys and values, for one of ``kv_heads`` heads, which share a
    token's outliers. Cosines and sines are not counted: all heads and layers read the same ones."""
    outliers = _OUTLIER_BYTES * (k.outliers + v.outliers) / kv_heads
    return (k.bytes_per_token + v.bytes_per_token + outliers) / (k.head_dim + v.head_dim)


def instruction_budget(k: Layout, v: Layout, capability: int, kv_heads: int = 1) -> float:
    """Thread instructions per element of keys and values below which memory is the limit; see
    `bytes_per_element`."""
    instructions, bandwidth = rates(capability)
    return bytes_per_element(k, v, kv_heads) * instructions / bandwidth


def loops(sass: str) -> list[Counter[str]]:
    """The instructions of each loop: from a label to the last branch back to it, both included.

    A branch inside a loop counts with both its sides, as if they were always run.
    """
    labels: dict[str, int] = {}
    names: list[str] = []
    ends: dict[int, int] = {}
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(names)
        elif instruction := _INSTRUCTION.match(line):
            names.append(instruction[1].split(".")[0])
            target = _BRANCH.search(instruction[2]) if names[-1] == "BRA" else None
            if target and target[1] in labels:
                ends[labels[target[1]]] = len(names)
    return [Counter(names[start:end]) for start, end in ends.items()]


def inspect_launch(launch: Launch, capability: int) -> KernelReport:
    """Compiles the kernel of a recorded launch for NVIDIA GPUs of this compute capability.

    Raises:
        KernelError: if it does not compile, or Triton's binary tools are missing.
    """
    if interpreted():
        raise KernelError(
            "Triton is in its interpreter; unset TRITON_INTERPRET to compile kernels."
        )
    name = launch.kernel.__name__
    compiled = _compile(launch, capability)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.cubin"
        path.write_bytes(compiled.asm["cubin"])
        usage = _run(tool("cuobjdump"), "--dump-resource-usage", str(path))
        sass = _run(tool("nvdisasm"), "-c", str(path))
    if (match := _USAGE.search(usage)) is None:
        raise KernelError(f"cuobjdump reports no resource usage for kernel {name}: {usage!r}.")
    registers, stack, local = int(match[1]), int(match[2]), int(match[4])
    counts = Counter(m[1].split(".")[0] for m in map(_INSTRUCTION.match, sass.splitlines()) if m)
    copying = [loop for loop in loops(sass) if loop["LDGSTS"]]
    main_loop = copying[0] if len(copying) == 1 else Counter()
    per_element = None
    if launch.step_elements and main_loop:
        threads = _WARP * launch.options.get("num_warps", _DEFAULT_WARPS)
        per_element = main_loop.total() * threads / launch.step_elements
    return KernelReport(
        name=name,
        capability=capability,
        registers=registers,
        stack=stack,
        local=local,
        # Dynamic shared memory is not in the binary, only in what the launcher is told.
        shared=int(compiled.metadata.shared),
        instructions=counts,
        main_loop=main_loop,
        per_element=per_element,
        path=Path(launch.kernel.fn.__code__.co_filename),
        sass=sass,
    )


def _compile(launch: Launch, capability: int) -> Any:
    """Triton's compiled kernel. The call is the same in Triton 3.6 and 3.9."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, known = launch.kernel, signature(launch)
    aligned = {(position,): [["tt.divisibility", ALIGNMENT]] for position in known.aligned}
    source = ASTSource(fn=kernel, signature=known.types, constexprs=known.constants, attrs=aligned)
    try:
        # Contraction to fused multiply-add is what a launch gets by default in Triton 3.6 to 3.9.
        options = launch.options | {"enable_fp_fusion": True}
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    except Exception as error:
        raise KernelError(
            f"Kernel {kernel.__name__} in {kernel.fn.__code__.co_filename} does not compile for "
            f"sm_{capability}: {error}."
        ) from error


@dataclass(frozen=True)
class Signature:
    """What the compiler knows of a kernel's arguments: their types, the values of constants, and
    the positions of arguments that 16 divides."""

    types: dict[str, str]
    constants: dict[str, Any]
    aligned: tuple[int, ...]


def signature(launch: Launch) -> Signature:
    """The signature that Inductor gives, which differs from that of a launch from Python: numbers
    are of double precision, and what divides the formula of a varying length is known."""
    types: dict[str, str] = {}
    constants: dict[str, Any] = {}
    aligned = []
    for position, name in enumerate(launch.kernel.arg_names):
        value = launch.arguments[name]
        if launch.is_constant(name) or (isinstance(value, int) and value == 1):
            types[name], constants[name] = "constexpr", value
        elif isinstance(value, float):
            types[name] = "fp64"
        else:
            types[name] = _TYPES[value.dtype] if isinstance(value, Tensor) else "i32"
            if isinstance(value, Tensor) or divides(ALIGNMENT, value):
                aligned.append(position)
    return Signature(types, constants, tuple(aligned))


@cache
def tool(name: str) -> str:
    """Path of a binary tool that comes with Triton."""
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    if not path.exists():
        raise KernelError(f"{name} is missing in this build of Triton; it should be {path}.")
    return str(path)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise KernelError(f"{command[0]} failed: {done.stderr.strip()}.")
    return done.stdout
