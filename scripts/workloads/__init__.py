"""One load for any OpenAI-style server: what `polychip bench workloads` sends, counts and shows."""
