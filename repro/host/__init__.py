"""The host side of the container: build, run, fetch."""
