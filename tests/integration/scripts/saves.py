"""A program of its own, on each rank: at SIGTERM, the first rank takes so many seconds to save."""

import os
import signal
import sys
import time

is_first = os.environ.get("RANK", "0") == "0"
if is_first:  # from here on the signal waits for `sigwait`, whenever it comes
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print("ready", flush=True)
if not is_first:
    signal.pause()
signal.sigwait({signal.SIGTERM})
print("saving", flush=True)
time.sleep(float(sys.argv[1]))
print("saved", flush=True)
