"""Additions made from outside of the package, as CONTRIBUTING.md shows them: a file each."""
