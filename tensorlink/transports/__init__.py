"""Ways for bytes to get from one memory to another: one file a transport, `base` the contract of all."""
