"""Arrays of a profile in, metrics and claims out. Nothing here draws."""
