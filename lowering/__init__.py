"""How ``kvpass::`` ops are computed: providers, and the choice of one for each op of a graph."""

from lowering.choice import Choice, lower

__all__ = ["Choice", "lower"]
