"""How ``kvpass::`` ops are computed: providers, and the choice of one for each op of a graph."""

from lowering.choice import Choice, choose, compiler_problem, lower
from lowering.codegen import generated_files

__all__ = ["Choice", "choose", "compiler_problem", "generated_files", "lower"]
