"""Results on disk in, markdown and figures out. Nothing here measures."""
