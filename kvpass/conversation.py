"""A conversation with a model whose packed cache goes on from turn to turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from transformers import DynamicCache, LogitsProcessorList, TextStreamer

from kvpass.evaluate import cache_bytes, first_difference
from kvpass.plan import Plan
from kvpass.recipes import Recipe
from kvpass.store.prefixes import PrefixStore
from kvpass.store.usage import Clock

_HALF = 2


@dataclass(frozen=True)
class Usage:
    """What a conversation holds and how fast it goes.

    Attributes:
        tokens: in the cache.
        held: bytes of the cache, spare room included.
        plain: bytes that as many tokens take in 16 bits.
        bits: that store one element.
        speed: tokens per second of the current reply, by the median step, so that steps that
            compiled do not count; 0 before there were two.
    """

    tokens: int
    held: int
    plain: int
    bits: float
    speed: float

    def __str__(self) -> str:
        speed = f", {self.speed:.1f} tokens/s" if self.speed else ""
        return (
            f"{self.tokens:,} tokens in {self.held:,} bytes, {self.bits:.2f} bits per element; in "
            f"16 bits {self.plain:,}{speed}"
        )


class Conversation:
    """Replies of a model to one text after the other.

    With a chat template the texts are turns of a user; without, each is appended to what was
    written so far, and the model completes it.

    Args:
        model: a causal language model; it is compiled in place.
        tokenizer: its tokenizer.
        planner: the recipe or the plan of its cache.
        tokens: the most that a reply has.
        temperature: of sampling; 0: the likeliest token.
        inner: what compiles the rewritten graph, see `kvpass.options.Options`.
        prefixes: where what was read is stored, and found by what begins with it.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        planner: Recipe | Plan,
        *,
        tokens: int = 256,
        temperature: float = 0.0,
        inner: str = "inductor",
        prefixes: PrefixStore | None = None,
    ) -> None:
        self.model, self.tokenizer, self.prefixes = model, tokenizer, prefixes
        self.tokens, self.temperature, self.inner = tokens, temperature, inner
        self.messages: list[dict[str, str]] = []
        self._cache: Any = None
        self._streamer: _Streamer | None = None
        self.use(planner)

    def use(self, planner: Recipe | Plan) -> None:
        """Compiles the model anew; the next turn reads the whole conversation again, since a cache
        keeps the format in which it was begun."""
        torch.compiler.reset()
        self.model.compile(backend="kvpass", options={"recipe": planner, "inner": self.inner})
        self._forget()

    def reply(self, text: str, show: Callable[[str], None] = lambda piece: None) -> str:
        """The model's answer to ``text``; ``show`` gets it piece by piece. An exception, such as an
        interrupt, leaves the conversation as it was."""
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = self._ids(messages)
        cache = self._cache_for(ids[0])
        streamer, clock = _Streamer(self.tokenizer, show), Clock()
        new = ids.shape[1] - int(cache.get_seq_length())
        sampled = {"temperature": self.temperature} if self.temperature else {}
        # Until the reply is whole, the cache is ahead of what is known of it.
        self._forget()
        self._cache, self._streamer = cache, streamer
        try:
            out = self.model.generate(
                ids.to(self.model.device),
                attention_mask=torch.ones_like(ids, device=self.model.device),
                past_key_values=cache,
                max_new_tokens=self.tokens,
                do_sample=bool(sampled),
                streamer=streamer,
                logits_processor=LogitsProcessorList([clock]),
                **sampled,
            )
        except BaseException:
            self._forget()
            raise
        # The last token has not been read.
        self._read = out[0, :-1].cpu()
        answer: str = self.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        if self.prefixes is not None:
            self.prefixes.add(self.model, cache, self._read, seconds=clock.seconds / new)
        return answer

    @property
    def usage(self) -> Usage:
        """The usage of the reply that is being written, or of the last."""
        layers = [x for x in getattr(self._cache, "layers", []) if x.is_initialized]
        if not layers:
            return Usage(0, 0, 0, 0.0, 0.0)
        held, bits = cache_bytes(self._cache)
        plain = _HALF * sum(x.keys.numel() + x.values.numel() for x in layers)
        speed = self._streamer.speed if self._streamer else 0.0
        return Usage(self._cache.get_seq_length(), held, plain, bits, speed)

    def _forget(self) -> None:
        self._cache, self._streamer = None, None
        self._read = torch.empty(0, dtype=torch.long)

    def _ids(self, messages: list[dict[str, str]]) -> torch.Tensor:
        """Token ids ``[1, T]`` of all that was said."""
        if self.tokenizer.chat_template is None:
            text = "".join(message["content"] for message in messages)
            ids: torch.Tensor = self.tokenizer(text, return_tensors="pt")["input_ids"]
            return ids
        found = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        return torch.as_tensor(found["input_ids"])

    def _cache_for(self, ids: torch.Tensor) -> Any:
        """A cache of the first tokens of ``ids`` ``[T]``, but not of the last: the one there is,
        cut where they differ, a stored one, or an empty one."""
        same = first_difference(self._read, ids[: self._read.numel()])
        kept = min(self._read.numel() if same is None else same, ids.numel() - 1)
        whole = kept == self._read.numel()
        # A window that slides has forgotten what would be read again.
        if kept == 0 or not (whole or not any(self._cache.is_sliding)):
            found = None if self.prefixes is None else self.prefixes.find(self.model, ids)
            return DynamicCache(config=self.model.config) if found is None else found
        if not whole:
            self._cache.crop(kept - self._read.numel())
        return self._cache


class _Streamer(TextStreamer):
    """Hands over text as soon as it is certain, and keeps the times of tokens."""

    def __init__(self, tokenizer: Any, show: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._show, self._prompt = show, True
        self._times: list[float] = []

    @property
    def speed(self) -> float:
        """Tokens per second, see `Usage`."""
        steps = [after - before for before, after in pairwise(self._times)]
        return 1 / median(steps) if steps else 0.0

    def put(self, value: torch.Tensor) -> None:
        """Called with the prompt first, then with every token."""
        if not self._prompt:
            self._times.append(time.perf_counter())
        self._prompt = False
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Called with text that will not change."""
        self._show(text)
