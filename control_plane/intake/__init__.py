"""First stage of a request: validate, tokenize, and stream the answer back."""
