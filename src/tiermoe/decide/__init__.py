"""Decisions: who comes, in which precision, who leaves. No tensors, no files."""
