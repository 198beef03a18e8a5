"""Messages and services shared by all processes; the modules are generated from *.proto."""
