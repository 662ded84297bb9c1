"""Static gates of decode attention: what its machine code must look like, for two GPU generations.

Instructions per element: all instructions between the main loop's label and its last branch back,
times the threads of a program, over the elements of keys *and* values of a tile; branches count
with both sides.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from kvpass.bench.plans import layer_plan
from kvpass.cli.options import TARGETS
from kvpass.recipes import RECIPES, Auto, Cocktail, Kvmix, Kvquant, Rotated, recipe
from lowering.triton.inspection import (
    inspect_launch,
    instruction_budget,
    loops,
    matrix_products,
)
from lowering.triton.layer import KV_HEADS, layer_launches
from lowering.triton.layouts import layout_of
from tests.lowering.triton.test_compile import KEEP, VARIANT

HEAD_DIM = 128
HEADS_PER_GROUP = 4
SINKS = "/sinks=5,window=128,pack_every=1"
RUNS = "/sinks=5,window=128,pack_every=32"
# Bounds on instructions per element, a few percent above the higher of both generations, so that
# another patch release of Triton passes and another kernel does not.
BOUNDS = {
    ("fp", "fp"): 1.05,
    # kivi-2bit and kivi-4bit
    ("int2.channel32/window=0,pack_every=128", "int2.token32/window=128,pack_every=1"): 2.06,
    ("int4.channel32/window=0,pack_every=128", "int4.token32/window=128,pack_every=1"): 2.30,
    # More bits for the important layers of kvmix.
    ("int3.channel32/window=0,pack_every=128", "int4.token32/window=128,pack_every=1"): 2.70,
    ("int2.channel32/window=0,pack_every=128", "int4.token32/window=128,pack_every=1"): 2.25,
    ("int3.channel32/window=0,pack_every=128", "int2.token32/window=128,pack_every=1"): 2.63,
    # rotated-4bit, -k4v2 and -2bit
    (f"int4.channel32.fp8{RUNS}", f"int4.token32.fp8{SINKS}"): 2.60,
    (f"int4.channel32.fp8{RUNS}", f"int2.token64.fp8{SINKS}"): 2.42,
    (f"int2.token64.fp8{SINKS}", f"int2.token64.fp8{SINKS}"): 1.75,
    # Keys and values of one kind, with sinks.
    (f"int2.token128.fp8{SINKS}", f"int2.token128.fp8{SINKS}"): 1.53,
    (f"int2.token128.fp8{SINKS}", f"int1.5.token128.ternary_in_2bit.fp8{SINKS}"): 1.53,
}


KIVI = (
    ("int2.channel32/window=0,pack_every=128", "int2.token32/window=128,pack_every=1"),
    ("int4.channel32/window=0,pack_every=128", "int4.token32/window=128,pack_every=1"),
)
# The bounds of a chunk by its bits are those of a whole cache.
CHUNKS = {2: KIVI[0], 4: KIVI[1], 16: ("fp", "fp")}
# Of the first of `KIVI` with all that attention may have beside it, `VARIANT`.
VARIANT_BOUND = 2.62


def budget(plans: tuple[str, str], capability: int) -> float:
    k, v = (layout_of(plan, HEAD_DIM) for plan in plans)
    return instruction_budget(k, v, capability)


# Over its budget: a digit of base 3 is a quotient of its byte, two instructions for two of them.
# Rows of 13 words are read one by one, too, and not copied ahead. Three values in two bits
# (`ternary_in_2bit`) take 23% more memory, and neither.
BASE3 = (f"int2.token128.fp8{SINKS}", f"int1.5.token128.fp8{SINKS}")
BASE3_BOUND = 2.50

# Formats that are decoded before they are multiplied, all over their budget of 2 to 4: a code is
# looked up in a table (2 to 4 instructions an element of keys and values), keys are scaled and
# rotated in half precision (2 of keys), and an outlier of values is compared with all channels of
# its head (those of keys read the query of theirs, from memory). Cheaper would be levels that are
# multiples of few numbers. Bytes of stack hold what loops over the last few tokens share, and with
# outliers some of the main loop, too.
CALIBRATED = {
    "kvquant-nuq4": (7.6, 16),
    "kvquant-nuq3": (6.3, 32),
    "kvquant-nuq2": (5.2, 16),
    "kvquant-nuq4-1%": (14.2, 440),
    "kvquant-nuq3-1%": (13.0, 440),
    "kvquant-nuq2-1%": (12.0, 440),
}


def test_the_formats_of_every_recipe_have_a_bound():
    for name in RECIPES:
        known = recipe(name)
        if isinstance(known, Kvquant):
            assert name in CALIBRATED
            continue
        if isinstance(known, Auto):
            # Mixes formats of the others.
            continue
        if isinstance(known, Cocktail):
            assert known.bits == tuple(CHUNKS)
            continue
        if isinstance(known, Kvmix):
            keys = {f"int{b}.channel32" for b in (known.key_bits, known.more_key_bits)}
            values = {f"int{b}.token32" for b in (known.value_bits, known.more_value_bits)}
            for k, v in product(keys, values):
                assert (f"{k}/window=0,pack_every=128", f"{v}/window=128,pack_every=1") in BOUNDS, (
                    name
                )
            continue
        if known.calibrated:
            # Bases change no kernel of attention, and clips only those that write.
            bases = {"reorder": False, "key_rotation": False, "value_rotation": False}
            own = {field: x for field, x in bases.items() if hasattr(known, field)}
            known = recipe(name, clip=False, **own)
        known = replace(known, clip=False) if isinstance(known, Rotated) else known
        plan = known.layer_plan("*", HEAD_DIM, HEAD_DIM)
        assert (str(plan.keys), str(plan.values)) in [*BOUNDS, BASE3], name


@pytest.mark.parametrize("capability", TARGETS.values())
def test_no_bound_is_over_its_budget(capability):
    over = [plans for plans, bound in BOUNDS.items() if bound > budget(plans, capability)]
    assert over == []


@pytest.mark.parametrize(("plans", "expected"), [
    (("fp", "fp"), 15.58),
    (("int4.channel32/window=0,pack_every=128", "int4.token128/window=128,pack_every=1"), 4.50),
    (("int2.channel32/window=0,pack_every=128", "int2.token32/window=128,pack_every=1"), 2.92),
])  # fmt: skip
def test_budget(plans, expected):
    """Bytes of an element times 33.5 / 4.3, e.g. 512 B / 256 * 7.79 for fp."""
    assert budget(plans, 90) == pytest.approx(expected, abs=0.005)


# Each takes many seconds to compile: the default for both generations, the rest for one, and of the
# mixtures of kvmix, whose keys and values are those of others, the largest.
OF_BOTH = {("fp", "fp"), KIVI[1]}
MIXED = [x for x in BOUNDS if "int3" in x[0] or ("int2.channel32" in x[0] and "int4" in x[1])]
LARGEST = max(MIXED, key=lambda plans: BOUNDS[plans])
LOOPS = [(x, c) for x in BOUNDS for c in TARGETS.values()
         if (c == 90 or x in OF_BOTH) and (x not in MIXED or x == LARGEST)]  # fmt: skip


@pytest.mark.parametrize(("plans", "capability"), LOOPS, ids=str)
def test_main_loop(plans, capability):
    check_main_loop(plans, capability, BOUNDS[plans])


def test_main_loop_with_all_that_attention_may_have():
    plans = KIVI[0][0] + KEEP, KIVI[0][1] + KEEP
    assert budget(plans, 90) >= VARIANT_BOUND
    check_main_loop(plans, 90, VARIANT_BOUND, **VARIANT)


def test_main_loop_in_base_3():
    assert budget(BASE3, 90) < BASE3_BOUND, "write down no reason"
    check_report(main_loop(BASE3, 90, copied_ahead=False), BASE3_BOUND)


def test_main_loops_of_chunks():
    """One for each number of bits, which compiles to what a cache of those bits does."""
    plan = recipe("cocktail").layer_plan("*", HEAD_DIM, HEAD_DIM)
    reports = main_loops((str(plan.keys), str(plan.values)), 90)
    for report, plans in zip(reports, CHUNKS.values(), strict=True):
        check_report(report, BOUNDS[plans])


def check_main_loop(plans, capability, bound, **variant):
    check_report(main_loop(plans, capability, **variant), bound)


def check_report(report, bound):
    assert not report.spills
    # Codes become numbers by masking.
    assert report.main_loop["I2F"] == report.main_loop["I2FP"] == 0
    assert report.per_element <= bound


def main_loop(plans, capability, **variant):
    (report,) = main_loops(plans, capability, **variant)
    return report


def main_loops(plans, capability, copied_ahead=True, **variant):
    """The reports of attention, whose main loops read what was copied to shared memory before."""
    launches = layer_launches(
        *plans, key_dim=HEAD_DIM, value_dim=HEAD_DIM, heads_per_group=HEADS_PER_GROUP, **variant
    )
    reports = [inspect_launch(x, capability) for x in launches if x.step_elements]
    for report in reports:
        assert report.per_element is not None, "no main loop was found"
        assert matrix_products(report.main_loop) > 0
        assert (report.main_loop["LDG"] == 0) == copied_ahead
    return reports


# With outliers, which take half a minute each, only the largest: what fewer bits change shows
# without them.
@pytest.mark.parametrize("name", [x for x in CALIBRATED if "%" not in x or "nuq4" in x])
def test_main_loop_of_calibrated_formats(name):
    bound, stack = CALIBRATED[name]
    x = torch.randn(1, KV_HEADS, 64, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    plan = layer_plan(name, x, x)
    k, v = (layout_of(str(p), HEAD_DIM) for p in (plan.keys, plan.values))
    assert bound > instruction_budget(k, v, 90, KV_HEADS), "write down no reason"
    # The query of an outlier is read where it is needed.
    report = main_loop((str(plan.keys), str(plan.values)), 90, copied_ahead="%" not in name)
    assert report.per_element <= bound
    assert report.stack <= stack
    assert "%" in name or report.main_loop["LDL"] == report.main_loop["STL"] == 0


SASS = """
        /*0000*/                   LDG.E R2, [R2.64] ;
.L_x_1:
        /*0010*/              @!P0 LDGSTS.E.128 [R3], [R4.64] ;
        /*0020*/               @P1 BRA `(.L_x_2) ;
        /*0030*/                   HMMA.16816.F32 R8, R4, R2, R8 ;
.L_x_2:
        /*0040*/                   IADD3 R1, R1, 0x1, RZ ;
        /*0050*/               @P0 BRA `(.L_x_1) ;
        /*0060*/                   EXIT ;
.L_x_3:
        /*0070*/                   BRA `(.L_x_3);
"""


def test_loops_are_backward_branches():
    first, trap = loops(SASS)
    assert first == {"LDGSTS": 1, "BRA": 2, "HMMA": 1, "IADD3": 1}
    assert trap == {"BRA": 1}
