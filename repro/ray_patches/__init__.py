"""Apply, verify and revert ``patches/`` on an installed Ray or a source tree."""
