"""Orders of channels: put beside the cache, then pushed into weights."""
