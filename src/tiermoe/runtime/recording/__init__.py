"""A loaded model and a text to a routing trace with computing times."""
