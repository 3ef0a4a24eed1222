"""The measuring engine: the project's only timing code.

It knows torch.distributed and nothing of pycoll's insides, so that every backend is measured by the
same calls. From the bottom: `units` and `formulas` (arithmetic), `collectives` (buffers and exact
data), `engine` (the clock), `results` (records), `ranks` (processes), `compare` (interleaved
rounds), `tables` and `plots` (reports), `steps` (training steps).
"""
