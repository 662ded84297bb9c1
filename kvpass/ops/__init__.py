"""The meaning of every ``kvpass::`` op: schema, fake and reference, one file per op."""
