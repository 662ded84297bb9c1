"""Tiny random models of every decoder family in transformers, and what kvpass does to them."""
