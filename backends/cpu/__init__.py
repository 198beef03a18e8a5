"""The cpu backend: a set of CPU cores is a chip."""
