"""A backend of a third party: the smallest one that serves."""
