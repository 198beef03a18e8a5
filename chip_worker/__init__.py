"""The chip worker: one process that owns one chip and computes the steps it is sent."""
