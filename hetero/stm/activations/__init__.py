"""What autograd saves for backward: tensors that may leave the device, and handles of parameters."""
