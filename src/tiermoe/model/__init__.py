"""Models: decoders of our own built from blocks, transformers' code for the rest, the KV cache of both."""
