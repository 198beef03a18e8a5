"""Backends: everything that knows a make of chip, behind four contracts."""
