"""Experts between the drive, main memory and a GPU: what is loaded, when, in which precision, and what leaves."""
