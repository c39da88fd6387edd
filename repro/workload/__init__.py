"""The Ray Data graph: CPU preparation and one GPU stage per knob."""
