"""``kvpass bench``: how fast and how small, every number behind a check of its result."""
