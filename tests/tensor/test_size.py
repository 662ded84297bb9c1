"""What the tensors of a cache hold together."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvpass import recipe
from kvpass.tensor.size import held_bytes, size_alone, stored_bits
from tests.harness import compiled, run_steps
from tests.models import prompt, tiny_model


def test_cosines_and_sines_count_once() -> None:
    model = compiled(tiny_model("llama"), recipe("fp", before_rope=True))

    def tensors_of(rows: int) -> list[Tensor]:
        _, cache = run_steps(model, prompt(rows, 40), [40])
        return [t for layer in cache.layers for t in (layer.keys, layer.values)]

    tensors = tensors_of(1)
    rotary = tensors[0].cos_sin
    assert held_bytes(tensors) == sum(t.nbytes for t in tensors) - rotary.nbytes
    # 40 rows of 16 numbers, and for each tensor the 32 bits of its length; `fp` counts 16 bits.
    elements = 4 * 2 * 40 * 16
    exact = 32.0 if tensors[0].dtype == torch.float32 else 16.0
    assert stored_bits(tensors) == pytest.approx(exact + (40 * 16 * 32 + 4 * 32) / elements)
    three, alone = tensors_of(3), (held_bytes(tensors), pytest.approx(stored_bits(tensors)))
    assert size_alone(tensors) == size_alone(three) == alone
    assert stored_bits(three) < stored_bits(tensors)


def test_plain_tensors() -> None:
    x = torch.zeros(1, 2, 3, 4, dtype=torch.bfloat16)
    assert (held_bytes([x]), stored_bits([x])) == (48, 16.0)
    assert (held_bytes([x, x]), stored_bits([])) == (48, 0.0)
