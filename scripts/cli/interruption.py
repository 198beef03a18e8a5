"""How the command ends at Ctrl-C."""

EXIT_INTERRUPTED = 130
"""As shells have it: 128 and the number of SIGINT."""
