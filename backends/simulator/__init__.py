"""A model of accelerators in main memory: what a chip does with time, memory, order and faults."""
