"""Keys files as tests make them: with the words of Python, at a time of the test's own."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

from gateway.access.filestore import FileKeys
from gateway.access.keyfile import read_records
from gateway.access.records import timestamp
from gateway.config.keylimits import limits_told

_WORDS = {"max_context_tokens": "max_context", "max_output_tokens": "max_output"}


def keys_of(path, wall_now=None, tiers=None):
    return FileKeys(path, lambda: tiers or {}, time.time if wall_now is None else lambda: wall_now)


def run(call):
    """Run a call of a store; also where a loop runs already."""
    with ThreadPoolExecutor(1) as beside:
        return beside.submit(asyncio.run, call).result()


def create(path, *, wall_now=None, limits=None, expires_in_s=None, tiers=None, **settings):
    told = {_WORDS.get(name, name): value for name, value in settings.items()}
    if limits is not None:
        told["limits"] = limits_told(limits)
    if expires_in_s is not None:
        now = time.time() if wall_now is None else wall_now
        told["expires"] = timestamp(now + expires_in_s)
    return run(keys_of(path, wall_now, tiers).create(told))


def rotate(path, key_id, grace_s=0.0, *, wall_now=None):
    return run(keys_of(path, wall_now).rotate(key_id, grace_s))


def revoke(path, key_id, *, wall_now=None):
    return run(keys_of(path, wall_now).revoke(key_id))


def list_keys(path):
    return read_records(path)
