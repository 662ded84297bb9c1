"""`PackedLM`: a model whose cache is packed, as EleutherAI's lm-evaluation-harness wants it."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from tqdm.auto import tqdm
from transformers import DynamicCache

from kvpass._torch import many_graphs
from kvpass.evaluate.answers import filled
from kvpass.evaluate.quality import cache_size, read, step

# What the harness asks for: a key, or None for a window of a text, and token ids of a context and
# of its continuation.
Request = tuple[Any, list[int], list[int]]
Scored = tuple[float, bool]


@dataclass(frozen=True)
class _Row:
    """A request.

    Attributes:
        number: which of the requests.
        ids: context and continuation.
        first: where the continuation begins, which is scored.
        prompt: tokens that are prefilled; the others are read one by one.
    """

    number: int
    ids: tuple[int, ...]
    first: int
    prompt: int

    @property
    def prefilled(self) -> tuple[int, ...]:
        """The tokens that are prefilled."""
        return self.ids[: self.prompt]


class PackedLM(HFLM):
    """`HFLM <https://github.com/EleutherAI/lm-evaluation-harness>`_ that scores through the cache.

    A prompt is attended exactly whatever its cache will keep, so that one forward over a context
    and its continuation, which is what HFLM does, would show nothing of what packing costs. Here
    all of a context but its last token is prefilled, and the rest is read token by token: each
    score, also that of a single token, comes of a step that reads the cache. Without packing they
    are those of HFLM. Texts are generated as HFLM does, behind an exact prompt.

    Args:
        model: a causal language model of transformers, compiled or not.
        tokenizer: its own.
        batch: sequences at a time, always as many.
        prompt: tokens that are prefilled of texts that are scored from their beginning
            (``loglikelihood_rolling``). They are scored, too, without any loss.
        length: tokens of a context and its continuation at most; None: what the model supports.

    Attributes:
        size: `cache_size` behind the longest text that was read.
        shortened: requests to score that were longer, and lost their beginning.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        batch: int = 1,
        prompt: int = 256,
        length: int | None = None,
    ) -> None:
        own: dict[str, Any] = {"batch_size": batch, "max_length": length, "backend": "causal"}
        tokenizer = copy.deepcopy(tokenizer)
        if tokenizer.pad_token_id is None:
            # Never seen: the mask leaves it out. HFLM may add one that the model does not know.
            ends = tokenizer.eos_token_id
            tokenizer.pad_token_id = tokenizer.bos_token_id if ends is None else ends
        # It warns of each model that is not a name.
        log = logging.getLogger(HFLM.__module__)
        level = log.level
        log.setLevel(logging.ERROR)
        super().__init__(pretrained=model, tokenizer=tokenizer, **own)
        log.setLevel(level)
        self._prompt = prompt
        self.size: dict[str, Any] = {}
        self.shortened = 0

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text, or begins the next where a tokenizer has none for the end."""
        ends: int | None = self.tokenizer.eos_token_id
        return self.prefix_token_id if ends is None else ends

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, override_bs: Any = None
    ) -> list[Scored]:
        """For each request the log-probability of its continuation in nats, and whether greedy
        decoding gives it."""
        found: dict[int, Scored] = {}
        name, hidden = "Running loglikelihood requests", disable_tqdm or self.rank != 0
        bar = tqdm(total=len(requests), desc=name, disable=hidden, leave=False)
        # Dynamo stops at eight graphs, and runs the model without packing: prompts and steps of
        # one sequence and of a batch are more, together with those of `generate`.
        with bar, torch.no_grad(), many_graphs():
            for number, scored in self._scored([self._row(*r) for r in enumerate(requests)]):
                found[number] = scored
                if (key := requests[number][0]) is not None:
                    self.cache_hook.add_partial("loglikelihood", key, scored)
                bar.update()
        return [found[number] for number in range(len(requests))]

    def _model_generate(
        self, context: Tensor, max_length: int, stop: list[str], **kwargs: Any
    ) -> Tensor:
        """Tokens ``[B, T]`` of contexts and what follows them."""
        cache, rows = DynamicCache(config=self.config), len(context)
        full, mask = (
            torch.cat([x, x[-1:].expand(self.batch_size - rows, -1)])
            for x in (context, kwargs.pop("attention_mask"))
        )
        more = {**kwargs, "attention_mask": mask, "past_key_values": cache}
        with many_graphs():
            out: Tensor = super()._model_generate(full, max_length, stop, **more)
        self._keep_size(cache)
        return out[:rows]

    def _row(self, number: int, request: Request) -> _Row:
        key, context, continuation = request
        # As HFLM cuts it: the last token is not read.
        whole = (*context, *continuation)
        ids = whole[-(self.max_length + 1) :]
        self.shortened += len(ids) < len(whole)
        first = len(ids) - len(continuation)
        prompt = max(first - 1, 1 if key is not None else self._prompt)
        return _Row(number, ids, first, min(prompt, len(ids) - 1))

    def _scored(self, rows: list[_Row]) -> Iterator[tuple[int, Scored]]:
        """Results by the number of the request. Equal prompts are read once, those of one length
        together."""
        rows.sort(key=lambda row: (-row.prompt, row.prefilled, -len(row.ids)))
        for _, same in groupby(rows, key=lambda row: row.prompt):
            groups = [list(group) for _, group in groupby(same, key=lambda row: row.prefilled)]
            for start in range(0, len(groups), self.batch_size):
                yield from self._of_prompts(groups[start : start + self.batch_size])

    def _of_prompts(self, groups: list[list[_Row]]) -> Iterator[tuple[int, Scored]]:
        """Results of all rows of some prompts of one length."""
        prompts = [group[0].prefilled for group in groups]
        # A lone one need not be read as often as there are rows.
        ids = self._tensor(prompts if len(prompts) == 1 else filled(prompts, self.batch_size))
        keep = 0 if any(row.first < row.prompt for group in groups for row in group) else 1
        logits, cache = read(self.model, ids, None, keep)
        rows = [(i, row) for i, group in enumerate(groups) for row in group]
        for start in range(0, len(rows), self.batch_size):
            chunk = rows[start : start + self.batch_size]
            numbers, own = zip(*filled(chunk, self.batch_size), strict=True)
            order = torch.tensor(numbers, device=self.device)
            copied = copy.deepcopy(cache)
            copied.reorder_cache(order)
            scored = self._read(own, logits[order], copied)
            yield from zip((row.number for _, row in chunk), scored, strict=False)

    def _read(self, rows: Sequence[_Row], logits: Tensor, cache: Any) -> list[Scored]:
        """Results of rows with their prompts in the cache and the last logits ``[B, K, V]`` of
        those."""
        lengths = torch.tensor([len(row.ids) for row in rows], device=self.device)
        firsts = torch.tensor([row.first for row in rows], device=self.device)
        longest, prompt = int(lengths.max()), rows[0].prompt
        ids = self._tensor([(*row.ids, *[0] * (longest - len(row.ids))) for row in rows])
        total, greedy = torch.zeros_like(lengths).double(), torch.ones_like(lengths).bool()
        behind = prompt + 1 - logits.shape[1]
        for position in range(behind, longest):
            if position <= prompt:
                predicted = logits[:, position - behind].float()
            else:
                predicted, cache = step(self.model, ids[:, position - 1 : position], cache)
            tokens = ids[:, position, None]
            logprobs = predicted.log_softmax(-1).gather(1, tokens)[:, 0]
            counts = (firsts <= position) & (position < lengths)
            total += logprobs.double().where(counts, 0)
            greedy &= ~counts | (predicted.argmax(-1) == tokens[:, 0])
        self._keep_size(cache)
        return list(zip(total.tolist(), greedy.tolist(), strict=True))

    def _tensor(self, ids: Sequence[tuple[int, ...]]) -> Tensor:
        return torch.tensor(ids, dtype=torch.long, device=self.device)

    def _keep_size(self, cache: Any) -> None:
        found = cache_size(cache)
        if found["cached"] >= self.size.get("cached", 0):
            self.size = found
