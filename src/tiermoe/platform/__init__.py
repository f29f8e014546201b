"""The process and the machine it runs on: memory, files and locks by the calls of Linux and macOS."""
