"""The version of the package, which files that it keeps name."""

VERSION = "0.1.0"
