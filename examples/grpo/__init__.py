"""Asynchronous GRPO on a queue: the learning half of `rollmq demo`.

`task` is the problem and its reward, `objective` the formulas, `learner` the optimiser, `run` the
programme that ties them to a broker and workers. Importing this package imports nothing heavy.
"""
