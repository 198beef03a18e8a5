"""The sim backend: a whole Polychip on simulated chips, with a real chip's rules and faults."""
