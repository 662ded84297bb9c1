"""Many requests at once: packed pages in transformers' continuous batching."""
