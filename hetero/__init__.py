"""hetero: train PyTorch models bigger than the device, with the same numbers."""
