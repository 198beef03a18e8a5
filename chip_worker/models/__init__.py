"""Model architectures, written once over kernels and communicator."""
