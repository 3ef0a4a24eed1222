"""pycoll: collectives for PyTorch that one can read, and that never hang or lie."""
