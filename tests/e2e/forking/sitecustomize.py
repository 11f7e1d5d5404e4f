"""For the Python of a vLLM, on its path: on a CPU, too, an engine is a fork of its server, as it is on a GPU.

By itself vLLM has each of its processes on a CPU import everything anew, which is half of what a start takes.
"""

from multiprocessing import context

context.SpawnProcess._Popen = staticmethod(context.ForkProcess._Popen)
