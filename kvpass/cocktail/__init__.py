"""Cocktail: chunks of a prompt in different bits, by their relevance to the query (Tao et al.,
2025)."""

from __future__ import annotations

from kvpass.cocktail.bits import ChunkBits as ChunkBits
from kvpass.cocktail.context import use as use
from kvpass.cocktail.encoders import Bm25 as Bm25
from kvpass.cocktail.encoders import TokenEmbeddings as TokenEmbeddings
from kvpass.cocktail.encoders import TransformersEncoder as TransformersEncoder
from kvpass.cocktail.search import chunk_bits as chunk_bits
