"""A recipe that trains a small Qwen3-MoE from a folder of text: ``python -m training.train``."""
