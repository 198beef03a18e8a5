"""Third stage of a request: carry steps to the chip workers and results back."""
