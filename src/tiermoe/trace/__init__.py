"""What a routing trace holds, and its files."""
