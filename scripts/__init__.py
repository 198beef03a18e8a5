"""The command line, the launcher and the client library: the top layer."""
