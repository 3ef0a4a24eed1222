"""The measuring engine: the project's only timing code.

It measures every backend by the same calls. From the bottom: `units` and `formulas` (arithmetic), `cases` (what
is timed), `exact_data` and `buffers` (data whose results are known), `results` (records), `engine` (the clock),
`background` (a matrix product meanwhile), `peers` (pycoll, torch's backends, MPI, the floor), `ranks` and
`torchrun` (processes), `limit` (the roofline), `link`, `compare` (interleaved rounds), `history` (results side
by side), `fit` and `models` (cost models), `tune` (the selector's table), `tables`, `plots`, `csv_rows` and
`report`, `arguments` (the command line), `steps` and `wrappers` (training steps).
"""
