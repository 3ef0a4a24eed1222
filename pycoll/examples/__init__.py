"""Whole jobs on pycoll: a small GPT under DistributedDataParallel, and the demonstration built on
it.
"""
