"""The search for factors of clipping against attention written out query by query."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvpass import ChannelOrder, LayerPlan
from kvpass.calibration.clipping import ALPHAS, ClipSearch
from kvpass.calibration.samples import AttentionSample
from kvpass.format.parse import parse_plan
from kvpass.format.quantize import fake_quantize
from kvpass.format.rope import Rope
from tests.strategies import randn

ROPE = Rope("neighbours", 4, 16)
TOKENS, DIM, WINDOW, SINKS = 40, 16, 8, 3
PLAN = parse_plan(f"int2.token8.fp8/sinks={SINKS},window={WINDOW},pack_every=1")


def random_sample(seed: int = 0, **variant) -> AttentionSample:
    q, keys, values = (
        randn(2, heads, TOKENS, DIM, seed=seed + i) for i, heads in enumerate((4, 2, 2))
    )
    # An outlier in every group, which clipping should give up.
    keys[..., ::8] *= 4
    values[..., 3::8] *= 4
    plain = {"mask": None, "scale": 0.3, "sinks": None, "causal": True, "softcap": 0.0}
    plain |= {"rotations": (), "before_rope": keys}
    return AttentionSample("layer", q, keys, values, **(plain | variant))


def attention(
    sample: AttentionSample, position: int, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """The output of one query, ``[B, Hq, D]``; keys and values ``[B, H, T, D]``."""
    k, v = (x[:, :, : position + 1].repeat_interleave(2, dim=1) for x in (keys, values))
    scores = (k @ sample.q[:, :, position, :, None])[..., 0] * sample.scale
    if sample.softcap:
        scores = torch.tanh(scores / sample.softcap) * sample.softcap
    if sample.sinks is not None:
        scores = torch.cat([scores, sample.sinks.view(1, -1, 1).expand(2, -1, 1)], dim=2)
    weights = scores.softmax(-1)[..., : position + 1]
    return (weights.unsqueeze(2) @ v)[:, :, 0]


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Keys ``[B, H, T, D]`` behind a rotary embedding of channels 4 to 16."""
    angles = torch.arange(TOKENS)[:, None] / torch.arange(1, 7)
    return ROPE.rotate(x, torch.cat([angles.cos(), angles.sin()], dim=1)[None])


def expected(
    sample: AttentionSample, plan: LayerPlan, positions: list[int], kind: str
) -> torch.Tensor:
    """Squared errors ``[factors, H, groups]``."""
    before = plan.before_rope and kind == "keys"
    tensor, order = getattr(plan, kind), getattr(plan, f"{kind[:-1]}_basis")
    exact = getattr(sample, kind)
    errors = torch.zeros(len(ALPHAS), 2, 2)
    for i, alpha in enumerate(ALPHAS):
        stored = sample.before_rope if before else exact
        stored = stored if order is None else order.store(stored)
        rounded = fake_quantize(replace(tensor.codec, clip=alpha), stored)
        for group in range(2):
            inside = tensor.codec.groups.members(2, DIM)[:, None] == group
            mixed = torch.where(inside, rounded, stored)
            mixed = mixed if order is None else order.restore(mixed)
            mixed = rotated(mixed) if before else mixed
            for position in positions:
                attended = exact.clone()
                attended[:, :, SINKS : position - WINDOW] = mixed[:, :, SINKS : position - WINDOW]
                keys, values = (
                    (attended, sample.values) if kind == "keys" else (sample.keys, attended)
                )
                change = attention(sample, position, keys, values) - attention(
                    sample, position, sample.keys, sample.values
                )
                errors[i, :, group] += change.square().sum((0, 2)).view(2, 2).sum(1)
    return errors


@pytest.mark.parametrize(
    "variant",
    [{}, {"softcap": 2.0}, {"sinks": torch.tensor([0.5, 1.0, -1.0, 2.0])}, {"rotations": (ROPE,)}],
    ids=["plain", "softcap", "sinks", "before rope"],
)
def test_errors_are_those_of_the_attentions_output(variant):
    order = ChannelOrder.of(randn(2, DIM, seed=7).argsort(dim=1))
    paired = replace(PLAN, codec=replace(PLAN.codec, half_split=True))
    plan, sample = LayerPlan(paired, PLAN, order, order), random_sample(**variant)
    if "rotations" in variant:
        plan = replace(plan, key_basis=None, before_rope=True)
        sample = replace(sample, keys=rotated(sample.keys))
    search = ClipSearch(plan, seed=0)
    search.add(sample)
    generator = torch.Generator().manual_seed(0)
    first = WINDOW + SINKS + 1
    positions = torch.randint(first, TOKENS, (32,), generator=generator).unique().tolist()
    for kind in ("keys", "values"):
        wanted = expected(sample, plan, positions, kind)
        torch.testing.assert_close(search._errors[kind], wanted, rtol=1e-3, atol=1e-4)
        best = tuple(ALPHAS[i] for i in wanted.argmin(0).flatten())
        assert search.clip(kind) == best
        assert search.error(kind) == pytest.approx(float(wanted.amin(0).sum()), rel=1e-3)
        assert min(best) < 1


def test_several_heads_in_a_group_have_one_factor():
    plan = parse_plan("int2.token32/window=0,pack_every=1")
    search = ClipSearch(LayerPlan(plan, plan), seed=0)
    search.add(random_sample())
    assert [len(search.clip(kind)) for kind in ("keys", "values")] == [1, 1]


def test_texts_within_the_exact_tokens_say_nothing():
    plan = parse_plan("int2.token8/window=39,pack_every=1")
    search = ClipSearch(LayerPlan(plan, plan), seed=0)
    search.add(random_sample())
    assert search.clip("keys") == search.clip("values") == 1.0


def test_keys_per_channel_are_not_clipped():
    plan = LayerPlan(parse_plan("int2.channel8/window=0,pack_every=8"), PLAN)
    search = ClipSearch(plan, seed=0)
    search.add(random_sample())
    assert search.clip("keys") == 1.0
    assert isinstance(search.clip("values"), tuple)
