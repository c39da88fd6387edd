"""The Nsight Systems SQLite export: reading it into arrays, writing one."""
