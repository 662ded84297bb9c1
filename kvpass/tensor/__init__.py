"""`PackedKV`: the cache tensor that stores quantized tokens."""

# What it does without decoding registers itself.
from kvpass.tensor import native as native
