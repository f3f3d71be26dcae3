"""The update of one parameter: with which kernel, in which slices, with everything captured that decides it."""
