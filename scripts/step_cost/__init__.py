"""What the steps of a chip cost, operation by operation: what `polychip bench step` measures."""
