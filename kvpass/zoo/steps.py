"""Texts that the models of the zoo read, step by step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache

from kvpass.zoo.outcome import Mode
from kvpass.zoo.sizes import VOCABULARY

DECODE_STEPS = 12
# One prompt ends before the sliding window of 40 tokens and grows past it; one ends behind it.
PROMPT, PADDED_PROMPT = 30, 50
PADDING = (20, 3, 0)
STATIC_LENGTH = 64


@dataclass(frozen=True)
class Text:
    """Random token ids ``[B, T]``, their padding mask or None, and the length of the prompt."""

    ids: Tensor
    mask: Tensor | None
    prompt: int

    @property
    def visible(self) -> Tensor:
        """Positions that are not padding, bool ``[B, T]``."""
        return (torch.ones_like(self.ids) if self.mask is None else self.mask).bool()


def random_text(mode: Mode) -> Text:
    """The text of this mode."""
    prompt, padding = (PADDED_PROMPT, PADDING) if mode.padded else (PROMPT, (0,))
    total = prompt + DECODE_STEPS
    # The first and the last ids are special in some families.
    ids = torch.randint(
        8, VOCABULARY - 8, (len(padding), total), generator=torch.Generator().manual_seed(0)
    )
    mask = (torch.arange(total) >= torch.tensor(padding).unsqueeze(1)).long()
    return Text(ids, mask if mode.padded else None, prompt)


@torch.no_grad()
def run_steps(model: Any, text: Text, cache: Any) -> tuple[Tensor, Any]:
    """Logits ``[B, T, V]`` of a prompt and of single tokens after it, and the cache."""
    logits, position = [], 0
    for end in range(text.prompt, text.ids.shape[1] + 1):
        out = model(
            input_ids=text.ids[:, position:end],
            attention_mask=None if text.mask is None else text.mask[:, :end],
            past_key_values=cache,
            use_cache=True,
        )
        cache, position = out.past_key_values, end
        # Decoders without a head give hidden states.
        logits.append(out.logits if hasattr(out, "logits") else out.last_hidden_state)
    return torch.cat(logits, dim=1).float(), cache


def new_cache(mode: Mode, config: Any) -> Any:
    """An empty cache; None where the model makes its own."""
    if mode.cache == "dynamic":
        return None
    return StaticCache(config=config, max_cache_len=STATIC_LENGTH)
