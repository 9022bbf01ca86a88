"""A program of its own, on each rank: at SIGTERM, the first rank takes so many seconds to save."""

import os
import signal
import sys
import time


def save(number, frame):
    signal.signal(number, signal.SIG_IGN)
    print("saving", flush=True)
    time.sleep(float(sys.argv[1]))
    print("saved", flush=True)
    raise SystemExit(0)


if os.environ.get("RANK", "0") == "0":
    signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
while True:
    time.sleep(0.1)  # a signal that comes just before `signal.pause` would be waited for
