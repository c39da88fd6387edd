"""The host side of the container: build the image, run its commands, keep their results on this machine."""
