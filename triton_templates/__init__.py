"""Sources of the Triton kernels: one template per op, and the renderer."""

from triton_templates.layout import CAPACITY_TILE, Layout, next_power_of_2
from triton_templates.renderer import render, template_names

__all__ = ["CAPACITY_TILE", "Layout", "next_power_of_2", "render", "template_names"]
