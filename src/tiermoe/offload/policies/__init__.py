"""The decisions of a composition, each behind a name of its own. No tensors, no files, no clock."""
