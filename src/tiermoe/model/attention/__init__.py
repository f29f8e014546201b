"""Attention of a decoder's layers and what stands in its place: a kind a file."""
