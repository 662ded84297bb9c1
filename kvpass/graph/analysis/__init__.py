"""What is known of a graph before any rule runs: cache updates, attention, masks, effects."""
