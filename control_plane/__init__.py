"""The control plane: one process that takes requests, schedules them and streams steps to chip workers."""
