"""What runs in the interpreter that holds llama-cpp-python and gguf. Nothing here imports the rest of tiermoe: that
interpreter needs numpy beside them, and neither torch nor transformers."""
