"""Routing traces and their files."""
