"""One load for any OpenAI-style server: what `polychip bench compare` sends, counts and shows."""
