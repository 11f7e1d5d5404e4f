"""How much an upload holds in memory."""


def held_bytes(upload) -> int:
    """Return what it holds, unsent bytes included, besides the head that was read."""
    transport = None if upload._connection is None else upload._connection._transport
    unsent = 0 if transport is None else transport.get_write_buffer_size()
    return len(upload._held) + len(upload._fresh) + len(upload.form._buffer) + unsent
