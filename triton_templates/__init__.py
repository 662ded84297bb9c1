"""Sources of the Triton kernels: one template per op, and the renderer."""

from triton_templates.layout import Layout
from triton_templates.renderer import render, template_names

__all__ = ["Layout", "render", "template_names"]
