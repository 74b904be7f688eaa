"""The durable journal of the broker. It knows nothing of tasks: payloads and bodies are opaque bytes.

`interface` is what others may use, `local` the implementation on one disk, `reader` the read-only access for
tools and replay.
"""
