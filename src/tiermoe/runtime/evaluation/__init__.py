"""What a preset costs in quality and reaches in speed, against the 16-bit weights."""
