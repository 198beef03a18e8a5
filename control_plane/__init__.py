"""The control plane: takes requests, schedules them and streams steps to the chip workers."""
