"""A GPU that is not there, for which Inductor generates and compiles all it would compile for a
real one; nothing is run. It touches private PyTorch APIs.

Tensors are fake, so that any build of PyTorch will do. What Inductor asks of a GPU is answered from
a data sheet, and its kernels are compiled for that GPU, which Triton can do anywhere. In builds
without CUDA the dense attention of a prompt is decomposed where others call a library.
"""

from __future__ import annotations

import ctypes
import os
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch._dynamo import device_interface
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch._functorch import config as aot_config
from torch._guards import TracingContext
from torch._inductor import compile_fx
from torch._inductor import config as inductor_config
from torch._inductor.codecache import CacheBase
from torch._inductor.fx_passes import fuse_attention, pad_mm
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import proxy_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._triton import has_triton, triton_backend, triton_hash_with_backend

from kvpass._torch_cpp import cpp_problem, load_cpp
from kvpass.errors import KernelError

_SYSTEM = (CacheBase.get_system, CacheBase.get_local_cache_path)
DataDependentError = fake_tensor.DataDependentOutputException

# By compute capability: name, multiprocessors, bytes of memory, of L2 and of shared memory of a
# program and of a multiprocessor, from NVIDIA's data sheets.
_GPUS = {
    80: ("NVIDIA A100-SXM4-80GB", 108, 80 << 30, 40 << 20, 166912, 167936),
    90: ("NVIDIA H200", 132, 141 << 30, 60 << 20, 232448, 233472),
}

_NO_GUARD = r"""
#include <c10/core/impl/DeviceGuardImplInterface.h>
extern "C" void install() {
  static c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> guard;
  auto& known = c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)];
  if (known.load() == nullptr) known.store(&guard);
}
"""


def _install_device_guard() -> None:
    """Lets tensors say that they are on a GPU in a build that knows none. Stays, and does nothing
    where there is one."""
    if torch.backends.cuda.is_built():
        torch._C._ensureCUDADeviceGuardSet()
        return
    folder = Path(torch.__file__).parent / "lib"
    ctypes.CDLL(str(folder / "libc10.so"), mode=ctypes.RTLD_GLOBAL)
    try:
        load_cpp(_NO_GUARD, ()).install()
    except Exception as error:
        if (problem := cpp_problem(error)) is None:
            raise
        raise KernelError(
            f"A GPU cannot be simulated by this build of PyTorch: {problem}."
        ) from error


def _properties(capability: int) -> Any:
    name, processors, memory, l2, shared, all_shared = _GPUS[capability]
    return types.SimpleNamespace(
        name=name, major=capability // 10, minor=capability % 10, gcnArchName="",
        multi_processor_count=processors, total_memory=memory, L2_cache_size=l2, warp_size=32,
        max_threads_per_multi_processor=2048, max_threads_per_block=1024,
        regs_per_multiprocessor=65536, shared_memory_per_block=49152,
        shared_memory_per_block_optin=shared, shared_memory_per_multiprocessor=all_shared,
    )  # fmt: skip


def _always(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _answers(capability: int) -> dict[str, Callable[..., Any]]:
    """Functions of ``torch.cuda`` as they answer where there is such a GPU."""
    gpu = _properties(capability)
    values = {
        "is_available": True, "is_initialized": True, "_lazy_init": None, "device_count": 1,
        "current_device": 0, "set_device": None, "synchronize": None,
        "_exchange_device": 0, "_maybe_exchange_device": 0,
        "current_stream": types.SimpleNamespace(cuda_stream=0),
        "is_current_stream_capturing": False, "get_device_properties": gpu,
        "get_device_capability": (gpu.major, gpu.minor), "get_device_name": gpu.name,
        "is_bf16_supported": True, "mem_get_info": (gpu.total_memory, gpu.total_memory),
        "set_rng_state": None,
    }  # fmt: skip
    answers = {name: _always(value) for name, value in values.items()}
    # Made anew: a tensor belongs to the mode that is on.
    answers["get_rng_state"] = lambda *args: torch.zeros(16, dtype=torch.uint8, device="cpu")
    return answers


def _interface(answers: dict[str, Callable[..., Any]]) -> type[Any]:
    """The interface that Inductor asks in place of ``torch.cuda``."""
    names = ("current_device", "set_device", "device_count", "synchronize", "current_stream",
             "get_device_properties")  # fmt: skip
    methods = {name: staticmethod(answers[name]) for name in names}
    zero = staticmethod(answers["current_device"])
    methods |= dict.fromkeys(("exchange_device", "maybe_exchange_device", "get_raw_stream"), zero)
    worker = type("Worker", (), methods)
    return type("Interface", (device_interface.CudaInterface,), {**methods, "Worker": worker})


def _driver(capability: int) -> Any:
    """The driver that Triton asks in place of its own for NVIDIA's GPUs."""
    from triton.backends.compiler import GPUTarget

    return types.SimpleNamespace(
        get_current_target=_always(GPUTarget("cuda", capability, 32)),
        get_active_torch_device=_always(torch.device("cuda", 0)),
        get_current_device=_always(0),
        get_device_interface=_always(torch.cuda),
    )


@contextmanager
def simulated_gpu(capability: int) -> Iterator[FakeTensorMode]:
    """Inside, ``cuda`` is a GPU of this compute capability on which nothing can be run.

    Yields:
        The mode, not entered, under which its tensors are to be made.
    """
    import triton

    _install_device_guard()
    answers = _answers(capability)
    # Dynamo makes these tables when it first looks at them: not of what is patched below.
    TorchInGraphFunctionVariable._get_handlers()
    before = device_interface.get_interface_for_device("cuda")
    nothing = _always(None)
    patches = [
        *((torch.cuda, name, answer) for name, answer in answers.items()),
        (torch._C, "_cuda_getCurrentRawStream", _always(0)),
        (torch._C, "_cuda_cudaCachingAllocator_is_enabled", _always(True)),
        (triton.runtime.driver, "_active", _driver(capability)),
        (triton_helpers, "set_driver_to_gpu", nothing),
        # Nothing may be made on the device, or measured there.
        (FakeTensorMode, "avoid_device_init", True),
        (fake_tensor, "init_gpu_context", nothing),
        (proxy_tensor, "CONSTANT_NUMEL_LIMIT", -1),
        (fuse_attention, "_sfdp_init", nothing),
        (pad_mm, "_pad_mm_init", nothing),
    ]
    settings = dict.fromkeys(
        # It would measure products on the GPU.
        ("shape_padding", "fx_graph_cache", "joint_graph_constant_folding",
         "use_static_cuda_launcher"), False,
    )  # fmt: skip
    with ExitStack() as stack:
        for owner, name, new in patches:
            stack.enter_context(patch.object(owner, name, new, create=owner is torch._C))
        device_interface.register_interface_for_device("cuda", _interface(answers))
        stack.callback(device_interface.register_interface_for_device, "cuda", before)
        stack.enter_context(patch.dict(os.environ, {"KVPASS_TUNE": "0"}))
        stack.enter_context(inductor_config.patch({"compile_threads": 1, **settings}))
        stack.enter_context(aot_config.patch(enable_autograd_cache=False))
        # They remember whether there is a GPU; the keys of Inductor's caches tell which.
        for remembers in (has_triton, triton_backend, triton_hash_with_backend, *_SYSTEM):
            remembers.cache_clear()
            stack.callback(remembers.cache_clear)
        yield FakeTensorMode()


def stand_in(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """While Dynamo's graph is compiled: ``tensor`` on the simulated GPU, as its examples are."""
    mode = TracingContext.get().fake_mode
    assert mode is not None
    with mode:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


@dataclass(frozen=True)
class InductorKernel:
    """A Triton kernel as Inductor compiles it.

    Attributes:
        own: of kvpass, not of Inductor.
        signature: type of each argument.
        aligned: positions of the arguments that 16 divides.
        problem: why it does not compile, or empty.
    """

    name: str
    own: bool
    signature: dict[str, str]
    aligned: tuple[int, ...]
    problem: str


@dataclass
class InductorGraph:
    """Inductor's result for one graph.

    Attributes:
        kernels: in the order of the generated code.
        inputs: how many there are.
        static, mutated: positions of those that are the same memory in most calls, and of those
            that are written.
        lowered: the graph that code was generated from.
        capture_problem: why Inductor would not let CUDA graphs replay it, or empty.
    """

    kernels: list[InductorKernel] = field(default_factory=list)
    inputs: int = 0
    static: tuple[int, ...] = ()
    mutated: tuple[int, ...] = ()
    lowered: fx.Graph = field(default_factory=fx.Graph)
    capture_problem: str = ""


@contextmanager
def record_inductor() -> Iterator[list[InductorGraph]]:
    """Inside `simulated_gpu`: what Inductor compiles, graph by graph."""
    graphs: list[InductorGraph] = []
    inner, generate = compile_fx._compile_fx_inner, GraphLowering.codegen

    def compile_inner(gm: fx.GraphModule, examples: Any, **options: Any) -> Any:
        graph = InductorGraph(inputs=len(examples))
        graph.static = tuple(options.get("static_input_idxs") or ())
        graphs.append(graph)
        made: Any = inner(gm, examples, **options)
        graph.mutated = tuple(sorted(made.mutated_input_idxs))
        graph.capture_problem = made.disabled_cudagraphs_reason or ""
        return made

    def codegen(lowering: GraphLowering) -> Any:
        graphs[-1].lowered = lowering.module.graph  # type: ignore[assignment]
        return generate(lowering)

    def precompile(kernel: CachingAutotuner, *args: Any, **options: Any) -> None:
        graphs[-1].kernels.append(_compiled(kernel))

    with (
        patch.object(compile_fx, "_compile_fx_inner", compile_inner),
        patch.object(GraphLowering, "codegen", codegen),
        patch.object(CachingAutotuner, "precompile", precompile),
    ):
        yield graphs


def _compiled(kernel: CachingAutotuner) -> InductorKernel:
    """Compiles the first of a kernel's configurations as Inductor does, without loading it."""
    assert kernel.configs
    config, problem = kernel.configs[0], ""
    meta = kernel._create_compile_meta(config)
    try:
        kernel._precompile_config(config)
    # Triton raises many kinds of errors.
    except Exception as error:
        problem = f"{type(error).__name__}: {_root(error)}"
    (attributes,) = meta["configs"]
    aligned = tuple(sorted(path[0] for path in attributes))
    own, signature = kernel.custom_kernel, dict(meta["signature"])
    return InductorKernel(kernel.fn.__name__, own, signature, aligned, problem)


def _root(error: BaseException) -> str:
    """The first error, in one line; Triton wraps it once for each function on the way."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())


class WatchWaits(TorchDispatchMode):
    """Collects in ``found`` where the host waits for the device: operators that read numbers from
    it or copy them to it, each with the line that called it."""

    def __init__(self, line: Callable[[], str], found: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._line, self._found = line, found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs ``func``."""
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        crosses = name in ("_local_scalar_dense", "nonzero", "equal")
        if name == "_to_copy" and kwargs.get("device") is not None:
            crosses = torch.device(kwargs["device"]).type != args[0].device.type
        elif name == "copy_":
            crosses = args[0].device.type != args[1].device.type
        if crosses:
            self._found.append(f"{name} at {self._line()}")
        return func(*args, **kwargs)
