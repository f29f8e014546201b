"""Published systems that came after the five papers, or beside them: a file each with its preset. No figures of their
papers are made."""
