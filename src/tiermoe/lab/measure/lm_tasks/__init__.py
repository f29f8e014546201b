"""Tasks for lm-eval on local files: a definition each, and `documents`, which reads the files."""
