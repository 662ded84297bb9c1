"""The storage format of cache tensors, as data: codecs, groups, words, plans, and their state."""
