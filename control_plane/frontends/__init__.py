"""Intake in processes of its own: routing between them and the core, and the processes."""
