"""Ranks as processes, and guard bytes around tensors: for pycoll's tests and for yours.

    def my_ranks(scale):                       # a module-level function: it is pickled by name
        x = torch.full((3,), scale * dist.get_rank())
        dist.all_reduce(x)
        return x

    results = run_ranks(my_ranks, 4, 10.0)     # four processes, once; in rank order

    with RankPool(4) as pool:                  # four processes, many times
        pool.run(my_ranks, 10.0)
        pool.run(my_ranks, 20.0)

    run_streams(my_ranks, 4)               # four threads with a stream each: ranks on one GPU

What a caller of processes can count on:

- A call ends by its deadline. Ranks still running then are killed, and the error says where each
  one stood.
- Only processes started here are ever killed, and none of them outlives the caller.
- The error of the rank that failed first is raised, with its traceback; the other ranks' errors
  are listed below it.

Ranks are forked from a server process that has imported torch already, so they start in
milliseconds. They have one torch thread each, the environment variables that the caller has when
they start, and its `sys.path`. They end by `os._exit`, as all children of multiprocessing do: to
test what happens at interpreter exit, run a script as a subprocess instead.
"""

from pycoll.testing.guards import check_guards, guarded
from pycoll.testing.rank_pool import RankError, RankPool, run_ranks
from pycoll.testing.rank_process import RankFailure, report_progress
from pycoll.testing.stream_ranks import run_streams

__all__ = [
    "RankError",
    "RankFailure",
    "RankPool",
    "check_guards",
    "guarded",
    "report_progress",
    "run_ranks",
    "run_streams",
]
