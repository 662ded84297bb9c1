"""Registration of the ``kvpass::`` ops.

``Library.define/impl`` rather than ``torch.library.custom_op``: the latter's Python wrapper costs
about 10 microseconds a call, which 32 layers of three ops turn into a millisecond a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvpass.format.tensor_plan import TensorPlan

LIBRARY = torch.library.Library("kvpass", "DEF")
# The name of each op, by what an FX node's target is.
NAMES: dict[Any, str] = {}
# What each op means, by its name.
REFERENCES: dict[str, Callable[..., Any]] = {}
# The schema and the fake of each op, by its name.
SCHEMAS: dict[str, str] = {}
FAKES: dict[str, Callable[..., Any]] = {}


def define(schema: str, reference: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Registers an op whose kernel on every device is ``reference``, with shapes given by
    ``fake``."""
    name = schema[: schema.index("(")]
    LIBRARY.define(schema)
    LIBRARY.impl(name, reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"kvpass::{name}", fake, lib=LIBRARY)
    NAMES[getattr(torch.ops.kvpass, name).default] = name
    REFERENCES[name], SCHEMAS[name], FAKES[name] = reference, schema, fake


def op_of(plan: TensorPlan, name: str) -> Any:
    """The op that does ``append``, ``attention`` or ``unpack`` on tokens stored by ``plan``."""
    return getattr(torch.ops.kvpass, f"{name}{plan.op_suffix}").default


def returns_nothing(*_: object, **__: object) -> None:
    """The fake of an op that only changes its arguments."""
