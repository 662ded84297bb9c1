"""How cache tensors are stored: codecs, residency, and the tensor itself."""
