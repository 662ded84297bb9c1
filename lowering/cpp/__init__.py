"""``kvpass::`` ops on CPUs: C++ generated per codec and shape, compiled when a graph is lowered."""
