"""A model behind HTTP: requests that join and leave a running batch, and the dialects that clients speak."""
