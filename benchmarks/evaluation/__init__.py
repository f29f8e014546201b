"""lm-eval on a model, in this process and over HTTP."""
