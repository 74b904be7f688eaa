"""The broker's decisions as a pure state machine: (state, event, now) -> effects. No socket, file, clock or thread."""
