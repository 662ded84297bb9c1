"""How ``kvpass::`` ops are computed: providers, and the choice of one for each op of a graph."""

from lowering.choice import Choice, choose, compiler_problem, lower, served_by
from lowering.codegen import generated_files
from lowering.cpp.library import failed_kernels
from lowering.cpp.replay import repeat
from lowering.providers import direct_ops
from lowering.triton.launch import compile_ahead
from lowering.triton.tuning import TUNE_VARIABLE, Tuned, cache_tag, tunings

__all__ = [
    "TUNE_VARIABLE",
    "Choice",
    "Tuned",
    "cache_tag",
    "choose",
    "compile_ahead",
    "compiler_problem",
    "direct_ops",
    "failed_kernels",
    "generated_files",
    "lower",
    "repeat",
    "served_by",
    "tunings",
]
