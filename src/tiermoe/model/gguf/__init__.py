"""Models in GGUF files: config, names and tokenizer as llama.cpp's converter wrote them and transformers wants them."""
