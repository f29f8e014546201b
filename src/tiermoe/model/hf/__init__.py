"""Everything that touches transformers or the hub."""
