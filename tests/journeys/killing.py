"""The command line in a process that is killed after some calls of a method."""

KILL_AFTER = """
import importlib, os, signal, sys
module, name, method, calls, *sys.argv[1:] = sys.argv[1:]
owner = getattr(importlib.import_module(f"xcompat.{module}"), name)
original, left = getattr(owner, method), iter(range(int(calls) - 1))

def stop(*args, **options):
    result = original(*args, **options)
    if next(left, None) is None:
        os.kill(os.getpid(), signal.SIGKILL)
    return result

setattr(owner, method, stop)
from xcompat.cli import main
main()
"""
"""Arguments: module below xcompat, class, method, how many calls, and what is typed."""
