"""Sources of the Triton kernels: one template per op, and the renderer."""

from triton_templates.layout import CAPACITY_TILE, Layout
from triton_templates.renderer import render, template_names

__all__ = ["CAPACITY_TILE", "Layout", "render", "template_names"]
