"""This process and the machine it runs on: what it holds, what is free."""
