"""Makes processes slow: with this folder on PYTHONPATH, those of role SLOW_ROLE sleep SLOW_S before each message."""

import os
import sys
import time

if f"workers.{os.environ['SLOW_ROLE']}" in sys.orig_argv:
    from protocol.channel import Inbox

    receive = Inbox.receive

    def receive_slowly(self, timeout_s):
        incoming = receive(self, timeout_s)
        if incoming is not None:
            time.sleep(float(os.environ["SLOW_S"]))
        return incoming

    Inbox.receive = receive_slowly
