"""Specification in, profile on disk out."""
