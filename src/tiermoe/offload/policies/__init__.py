"""The decisions of a composition, each with a name of its own. No tensors, no files, no clock."""
