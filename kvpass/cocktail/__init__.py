"""Cocktail: chunks of a prompt in different bits, by their relevance to the query."""

from kvpass.cocktail.bits import ChunkBits as ChunkBits
from kvpass.cocktail.context import use as use
