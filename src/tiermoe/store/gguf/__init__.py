"""Checkpoints in llama.cpp's file format: headers, shards, and tensors by the names that a transformers model has for
them. Which GGUF tensor is which parameter is `tiermoe.model.gguf`'s to say."""
