"""What a sequence keeps: keys and values, recurrent states, prefixes in memory and on disk."""
