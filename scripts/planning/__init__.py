"""Which layout to serve a model with: needs measured, capacity and speed foretold, one advised."""
