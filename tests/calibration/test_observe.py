"""What calibration sees of a model is what its attentions compute."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel

from kvpass.calibration.observe import ModelRunner
from kvpass.calibration.samples import AttentionSample, GradientSample, Replacement, windowed
from kvpass.errors import UnmatchedGraphError
from kvpass.format.rope import Rope
from tests.models import prompt, tiny_model

# The module whose input is the attention's output, and how keys are rotated.
HALVES = (Rope("halves", 0, 16),)
FAMILIES: dict[tuple[str, str], tuple[str, tuple[Rope, ...]]] = {
    ("llama", "sdpa"): ("o_proj", HALVES),
    ("llama", "eager"): ("o_proj", HALVES),
    ("mistral", "sdpa"): ("o_proj", HALVES),
    ("qwen3", "sdpa"): ("o_proj", HALVES),
    ("gpt_neox", "sdpa"): ("dense", (Rope("halves", 0, 8),)),
    ("phi", "sdpa"): ("dense", (Rope("halves", 0, 8),)),
    ("glm4", "sdpa"): ("o_proj", (Rope("neighbours", 0, 8),)),
    ("cohere", "sdpa"): ("o_proj", (Rope("neighbours", 0, 16),)),
    ("opt", "sdpa"): ("out_proj", ()),
    ("gpt2", "sdpa"): ("c_proj", ()),
    ("bloom", "eager"): ("dense", ()),
    ("gemma2", "eager"): ("o_proj", HALVES),
    # It rotates halves in a spelling that no order is pushed through, so that any will do.
    ("gpt_oss", "eager"): ("o_proj", ()),
}


@pytest.mark.parametrize(("family", "attention"), FAMILIES)
def test_weights_and_values_make_the_attentions_output(family: str, attention: str) -> None:
    projection, rotations = FAMILIES[family, attention]
    model = tiny_model(family, attention=attention, layers=1)
    torch._dynamo.reset()
    outputs: list[torch.Tensor] = []
    attentions = [m for n, m in model.named_modules() if n.endswith(("attn", "attention"))]
    module = getattr(attentions[0], projection)
    module.register_forward_pre_hook(lambda _, args: outputs.append(args[0]))
    samples: list[AttentionSample] = []
    # Longer than a sliding window.
    ids = [prompt(2, 60, seed=1), prompt(1, 60, seed=2)]
    ModelRunner(model, ids, progress=False)(samples.append, "test")
    assert len(samples) == len(outputs) == 2
    for sample, output in zip(samples, outputs, strict=True):
        assert model.get_submodule(sample.layer) is attentions[0]
        assert sample.rotations == rotations
        positions = torch.tensor([0, 1, 17, 41, 58, 59])
        rows = sample.rows(sample.q[:, :, positions])
        weights = sample.weights(rows @ sample.keys.transpose(2, 3), positions)
        out = (weights @ sample.values).view(*sample.q.shape[:2], len(positions), -1)
        wanted = output.reshape(*output.shape[:2], sample.q.shape[1], -1)[:, positions]
        assert (out.transpose(1, 2) - wanted).abs().max().item() <= 2e-5


def test_layers_that_share_keys_and_values_are_one_layer() -> None:
    names: list[str] = []
    config = AutoConfig.for_model(
        "gemma3n_text", hidden_size=32, intermediate_size=32, num_hidden_layers=4, head_dim=16,
        num_attention_heads=2, num_key_value_heads=1, vocab_size=64, num_kv_shared_layers=2,
        vocab_size_per_layer_input=64, hidden_size_per_layer_input=8, laurel_rank=4,
        layer_types=["full_attention"] * 4, activation_sparsity_pattern=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = AutoModel.from_config(config).eval()
    torch._dynamo.reset()
    ModelRunner(model, [prompt(1, 20) % 64], progress=False)(
        lambda sample: names.append(sample.layer), ""
    )
    assert len(names) == 4
    assert set(names) == {f"layers.{i}.self_attn" for i in (0, 1)}


def test_models_of_one_class_with_heads_of_other_sizes() -> None:
    """Dynamo takes the scale of their attention for a variable then."""
    scales: list[float] = []
    torch._dynamo.reset()
    for dim in (16, 32, 64):
        model = tiny_model("llama", layers=1, head_dim=dim)
        run = ModelRunner(model, [prompt(1, 20)], progress=False)
        run(lambda sample: scales.append(sample.scale), "")
    assert scales == [16**-0.5, 32**-0.5, 64**-0.5]


def test_a_model_without_attention_is_refused() -> None:
    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> torch.Tensor:
            return self.linear(input_ids.float())

    with pytest.raises(UnmatchedGraphError, match=r"No attention .* is found in Plain"):
        ModelRunner(Plain(), [torch.ones(1, 4).long()], progress=False)(lambda sample: None, "")


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_exact_tokens_are_read_as_they_are(family: str) -> None:
    """Query by query: the last keys and values its own, all before them others."""
    model = tiny_model(family, attention="eager", layers=1)
    samples: list[AttentionSample] = []
    ModelRunner(model, [prompt(2, 40, seed=1)], progress=False)(samples.append, "test")
    (sample,) = samples
    keys, values = (torch.randn_like(x) for x in (sample.keys, sample.values))
    found = windowed(sample, keys, values, (3, 7))
    for position in (0, 2, 6, 20, 39):
        last = torch.arange(40) > position - 3, torch.arange(40) > position - 7
        k = torch.where(last[0][:, None], sample.keys, keys)
        v = torch.where(last[1][:, None], sample.values, values)
        rows = sample.rows(sample.q[:, :, [position]])
        weights = sample.weights(rows @ k.transpose(2, 3), torch.tensor([position]))
        out = (weights @ v).reshape(*sample.q.shape[:2], -1)
        assert (out - found[:, :, position]).abs().max().item() <= 2e-5
    # No more than a quarter of them.
    assert torch.equal(
        windowed(sample, keys, values, (99, 99)), windowed(sample, keys, values, (10, 10))
    )


@pytest.mark.parametrize("family", ["llama", "gpt2", "glm4", "qwen3"])
def test_gradients_are_those_of_what_later_tokens_read(family: str) -> None:
    """Against differences of the loss."""
    model = tiny_model(family, attention="eager", layers=2).double()
    run = ModelRunner(model, [prompt(1, 24, seed=1)], progress=False)
    gradients: list[GradientSample] = []
    run.gradients(gradients.append, "test", (4, 4))
    plain = run.loss(None, "test")
    for sample in gradients:
        step = 0.02 * torch.randn_like(sample.x)
        losses = [
            run.loss(Replacement(sample.layer, sample.kind, partial(torch.add, s), (4, 4)), "test")
            for s in (step, -step)
        ]
        # Sums over 23 tokens, in float32.
        change = (losses[0] - losses[1]) * 23 / 2
        assert change == pytest.approx(float((sample.gradient * step).sum()), rel=0.02, abs=3e-5)
    assert run.loss(Replacement(sample.layer, sample.kind, lambda x: x), "test") == pytest.approx(
        plain
    )
