"""A filter of one's own: which tokens stay exact behind the window.

    python -m examples.add_a_filter

A filter sees cached keys or values, never the text. This one keeps the tokens whose channels vary
most, and is compared with those that kvpass ships.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

import kvpass
from examples.quickstart import SMALL_MODEL, load, recall_prompt
from kvpass.evaluate import recall_accuracy


@kvpass.register_filter("variance")
def variance(tokens: Tensor) -> Tensor:
    """Scores ``[B, H, n]`` of tokens ``[B, H, n, D]``; the highest of each head stay exact.

    A score may depend on its own token only: tokens are scored again with every one that comes.
    """
    return tokens.float().var(dim=-1)


def with_filter(plan: kvpass.Plan, name: str, retained: int) -> kvpass.Plan:
    """``plan`` for all layers, with ``retained`` tokens of every KV head that stay exact."""
    keys, values = (
        replace(tensor, retention=replace(tensor.retention, filter=name, retained=retained))
        for tensor in (plan.default.keys, plan.default.values)
    )
    return kvpass.Plan(replace(plan.default, keys=keys, values=values))


def main(tokens: int = 512, questions: int = 16, retained: int = 32) -> None:
    """Prints what each filter does to recall, next to none, with groups of 64 and no clipping."""
    model, tokenizer = load(str(SMALL_MODEL), "float32")
    document = recall_prompt(tokenizer, tokens, questions)
    recipe = kvpass.recipe("skvq-k2v2", window=32, sinks=0, clip=False, reorder=False)
    plain = recipe.plan(model.config)
    names = ("variance", "heavy_hitters", "outliers")
    plans = {"none": plain, **{name: with_filter(plain, name, retained) for name in names}}
    for name, plan in plans.items():
        # Through a plain cache with the same rounding; a compiled model takes the same plans.
        new_cache = partial(kvpass.oracle_cache, plan, model.config)
        recall = recall_accuracy(model, [document], new_cache)
        print(f"filter {name:16} recall {recall:.1%}")


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
