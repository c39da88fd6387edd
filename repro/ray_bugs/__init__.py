"""The two upstream Ray bugs as experiments."""
