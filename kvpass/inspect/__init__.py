"""What kvpass did: reports of compiled graphs."""
