"""Commands of the laboratory, which `tiermoe.cli.main` imports when they are invoked."""
