"""A loaded model at work: passes, steps, experts, and what loads it."""
