"""kvpass: a ``torch.compile`` backend that keeps the KV cache of Hugging Face models in 2 to 4
bits.

``model.compile(backend="kvpass")``, then call or ``generate`` as before.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvpass.version import VERSION

if TYPE_CHECKING:
    from kvpass import backend as backend
    from kvpass import cocktail as cocktail
    from kvpass import evaluate as evaluate
    from kvpass.calibration.allocation import Allocation as Allocation
    from kvpass.calibration.allocation import allocate as allocate
    from kvpass.calibration.allocation import cost_curve as cost_curve
    from kvpass.calibration.calibrate import calibrate as calibrate
    from kvpass.calibration.candidates import score as score
    from kvpass.calibration.scores import Scores as Scores
    from kvpass.calibration.scores import importance as importance
    from kvpass.calibration.scores import sensitivities as sensitivities
    from kvpass.errors import KvpassError as KvpassError
    from kvpass.format.channels import ChannelOrder as ChannelOrder
    from kvpass.format.channels import ChannelRanges as ChannelRanges
    from kvpass.format.channels import ChannelRotation as ChannelRotation
    from kvpass.format.codec import Codec as Codec
    from kvpass.format.filters import register_filter as register_filter
    from kvpass.format.retention import RetentionPolicy as RetentionPolicy
    from kvpass.format.tensor_plan import Segment as Segment
    from kvpass.format.tensor_plan import TensorPlan as TensorPlan
    from kvpass.inplace import fold_inplace as fold_inplace
    from kvpass.inspect.explain import explain as explain
    from kvpass.options import compile_config as compile_config
    from kvpass.oracle import oracle_cache as oracle_cache
    from kvpass.plan import LayerPlan as LayerPlan
    from kvpass.plan import Plan as Plan
    from kvpass.recipes import Recipe as Recipe
    from kvpass.recipes import recipe as recipe
    from kvpass.rules import Rule as Rule
    from kvpass.rules import register_rule as register_rule
    from kvpass.serving.serve import serve_packed as serve_packed
    from kvpass.store.cache_file import load_cache as load_cache
    from kvpass.store.cache_file import save_cache as save_cache
    from kvpass.store.prefixes import PrefixStore as PrefixStore
    from kvpass.tensor.packed import PackedKV as PackedKV

__version__ = VERSION

# Imported on first use: TORCH_LOGS="+kvpass" imports this package while torch itself is being
# imported.
_NAMES = {
    "calibration.allocation": "Allocation allocate cost_curve",
    "calibration.calibrate": "calibrate",
    "calibration.candidates": "score",
    "calibration.scores": "Scores importance sensitivities",
    "errors": "KvpassError",
    "format.channels": "ChannelOrder ChannelRanges ChannelRotation",
    "format.codec": "Codec",
    "format.filters": "register_filter",
    "format.retention": "RetentionPolicy",
    "format.tensor_plan": "Segment TensorPlan",
    "inplace": "fold_inplace",
    "inspect.explain": "explain",
    "options": "compile_config",
    "oracle": "oracle_cache",
    "plan": "LayerPlan Plan",
    "recipes": "Recipe recipe",
    "rules": "Rule register_rule",
    "serving.serve": "serve_packed",
    "store.cache_file": "load_cache save_cache",
    "store.prefixes": "PrefixStore",
    "tensor.packed": "PackedKV",
}
_HOMES = {name: f"kvpass.{home}" for home, names in _NAMES.items() for name in names.split()}
_MODULES = ("backend", "cocktail", "evaluate")
_RENAMED = {"Residency": "RetentionPolicy"}
__all__ = [*_MODULES, *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"kvpass.{name}")
    if name in _RENAMED:
        warnings.warn(
            f"kvpass.{name} is called kvpass.{_RENAMED[name]} now; the old name is understood by "
            "this release only.",
            FutureWarning,
            stacklevel=2,
        )
        name = _RENAMED[name]
    if name not in _HOMES:
        raise AttributeError(f"module 'kvpass' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
