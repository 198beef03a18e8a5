"""Which chunks and batches suit these chips: what `polychip calibrate` measures and recommends."""
