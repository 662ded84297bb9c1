"""Groups of channels of any kind: every group is encoded as if it were alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpass import Codec, LayerPlan, TensorPlan
from kvpass.errors import OptionError, PlanError
from kvpass.format.groups import Groups
from kvpass.format.parse import parse_plan
from kvpass.format.quantize import decode, encode, fake_quantize
from tests.strategies import SEEDS, randn

DIM = 32


@st.composite
def grouped(draw):
    """A codec per token, and how many heads of DIM channels it is for."""
    heads = draw(st.sampled_from([1, 2, 4]))
    group = draw(st.sampled_from([4, 8, 16, 32, DIM * heads]))
    each = max(1, DIM // group)
    pairs = group <= DIM and draw(st.booleans())
    sizes = None
    if group <= DIM and draw(st.booleans()):
        unit = 2 if pairs else 1
        sizes = tuple(n for _ in range(heads) for n in draw(cuts(DIM // unit, each, unit)))
    count = heads * each if group <= DIM else heads * DIM // group
    clip = draw(st.sampled_from([1.0, 0.9, None]))
    if clip is None:
        clip = tuple(draw(st.sampled_from([1.0, 0.5, 0.85])) for _ in range(count))
    bits, params = draw(st.sampled_from([2, 3, 4])), draw(st.sampled_from(["half", "fp8"]))
    return heads, Codec(bits, "token", group, clip, params, False, pairs, sizes)


def cuts(total, parts, unit):
    """Sizes of ``parts`` groups of at least one, that add up to ``total``, in units."""
    places = st.lists(
        st.integers(1, total - 1), min_size=parts - 1, max_size=parts - 1, unique=True
    )
    return places.map(
        lambda at: [
            unit * (b - a) for a, b in zip([0, *sorted(at)], [*sorted(at), total], strict=True)
        ]
    )


def alone(x, codec, clip):
    """What becomes of elements ``[B, T, n]`` that are one group."""
    whole = Codec(codec.bits, "token", max(2, x.shape[2]), clip, codec.qparams)
    if x.shape[2] == 1:
        # Two equal ones have the same extremes.
        return fake_quantize(whole, x.expand(-1, -1, 2).unsqueeze(1))[:, 0, :, :1]
    return fake_quantize(whole, x.unsqueeze(1))[:, 0]


@settings(max_examples=60, deadline=None)
@given(kind=grouped(), seed=SEEDS)
def test_every_group_is_encoded_as_if_alone(kind, seed):
    heads, codec = kind
    x = randn(2, heads, 3, DIM, seed=seed) * 3 + 0.5
    assert codec.unsupported_reason(DIM, heads) is None
    joined = codec.groups.heads_per_group(DIM)
    wide = x.view(2, heads // joined, joined, 3, DIM).transpose(2, 3).flatten(3)
    members = codec.groups.members(heads, DIM).view(heads // joined, -1)
    wanted, clips = torch.empty_like(wide), codec.clip
    count = int(members.max()) + 1
    for h in range(heads // joined):
        for g in range(count):
            inside = members[h] == g
            clip = clips[h * count + g] if isinstance(clips, tuple) else clips
            wanted[:, h, :, inside] = alone(wide[:, h][..., inside], codec, clip)
    wanted = wanted.unflatten(3, (joined, DIM)).transpose(2, 3).reshape(x.shape)
    assert torch.equal(fake_quantize(codec, x), wanted)
    words, params = encode(codec, x)
    assert torch.equal(decode(codec, (words, params), torch.float32), wanted)
    bits = 8 * (words.nbytes + params.nbytes) / x.numel()
    assert bits == pytest.approx(codec.bits_per_element(DIM))


@given(kind=grouped())
def test_names_parse_back(kind):
    _, codec = kind
    assert Codec.parse(str(codec)) == codec


def test_names():
    codec = Codec(2, "token", 16, (0.9, 1.0), "fp8", False, True, (12, 20))
    assert str(codec) == "int2.token16.half_split.sizes12,20.fp8.clip0.9,1.0"
    assert str(Codec(2, "token", 32, (0.5,))) == "int2.token32.clip0.5,"


def test_pairs_are_two_runs_half_a_head_apart():
    assert Groups("token", 8, half_split=True).members(1, 16).tolist() == [
        [0, 0, 0, 0, 1, 1, 1, 1] * 2
    ]
    unequal = Groups("token", 8, half_split=True, sizes=(4, 12))
    assert unequal.members(1, 16).tolist() == [[0, 0, 1, 1, 1, 1, 1, 1] * 2]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"sizes": (8, 8, 8, 8)}, "4 sizes of groups do not fill 2 heads of 32 channels"),
        ({"sizes": (8, 24, 30, 3)}, "sizes of groups do not fill 2 heads"),
        ({"half_split": True, "sizes": (8, 24, 31, 1)}, "a group in two halves has an odd number"),
        ({"clip": (0.9, 0.8, 0.7)}, "3 factors of clipping do not fit the 4 groups of 2 heads"),
        ({"group": 24}, "group 24 does not divide head_dim 32"),
        ({"group": 48}, "group 48 does not divide head_dim 32"),
        ({"group": 128}, "group 128 spans 4 heads of 32, which 2 do not fill"),
        ({"group": 64, "half_split": True}, "is no two runs half a head of 32 apart"),
    ],
)
def test_what_does_not_fit_a_model_is_refused(fields, reason):
    codec = Codec(**{"bits": 2, "axis": "token", "group": 16, **fields})
    plan = TensorPlan(codec)
    with pytest.raises(PlanError, match=reason):
        LayerPlan(plan, plan).check("layer", 32, 32, 2)


@pytest.mark.parametrize(
    ("fields", "value"),
    [
        ({"clip": ()}, "clip"),
        ({"clip": (0.5, 0.0)}, "clip"),
        ({"clip": (0.5,), "axis": "channel"}, "clip"),
        ({"half_split": 1}, "half_split"),
        ({"half_split": True, "axis": "channel"}, "half_split"),
        ({"sizes": ()}, "sizes"),
        ({"sizes": (4, 0)}, "sizes"),
        ({"sizes": (4, 4), "axis": "channel"}, "sizes"),
    ],
)
def test_fields_that_are_not_allowed(fields, value):
    with pytest.raises(OptionError, match=f"^{value}=.* is not supported"):
        Codec(**{"bits": 2, "axis": "token", "group": 4, **fields})


def test_long_lists_are_shortened_for_people():
    plan = parse_plan(
        "int2.token8.sizes2,14,9,7.clip0.9,0.85,1.0,0.9/sinks=5,window=1,pack_every=1"
    )
    assert plan.summary() == "int2.token8.sizes2..14.clip0.85..1.0/sinks=5,window=1,pack_every=1"
    plain = parse_plan("int2.token8.clip0.9/window=1,pack_every=1")
    assert plain.summary() == str(plain)
