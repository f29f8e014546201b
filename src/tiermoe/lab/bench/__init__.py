"""`tiermoe bench`: this program and the ones people run instead, side by side in one run."""
