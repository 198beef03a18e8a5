"""The command polychip: one module a command."""
