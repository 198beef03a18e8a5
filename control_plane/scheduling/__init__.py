"""Second stage of a request: the pure scheduling core, driven by events and a given clock."""
