"""The check of subnormal products, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.interpreter


@pytest.mark.parametrize(("bits", "position"), [(2, 0), (2, 8), (4, 4)])
def test_codes_as_subnormals(bits, position):
    from kvpass.bench.subnormals import subnormal_differences

    assert subnormal_differences(bits, position, torch.device("cpu")) == 0
