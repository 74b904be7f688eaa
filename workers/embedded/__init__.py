"""A small inference server for laptops and tests: a real causal LM with torch, or the `sim:` model without it.

It speaks the same kind of HTTP as the large engines (generate, abort, pause, update weights), in one process, one
model, one device. It is no replacement for them: no paged attention, no tensor parallelism, no prefix cache.
Start it with `python -m workers.embedded`. Nothing here may import torch outside `model`, `kv_cache`, `sampling`
and `weights`, so that the `sim:` model starts at once.
"""
