"""Settings of all tests."""

from hypothesis import settings

# How fast an example runs says something about the machine, not about the code.
settings.register_profile("gateway", deadline=None)
settings.load_profile("gateway")
