"""Packed tensors become the tensors that they are made of, and a graph ready to be compiled."""
