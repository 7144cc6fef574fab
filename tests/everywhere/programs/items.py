"""What a queue's items are worked on with."""

import hashlib
import os
import time


def digest(item):
    while "hold" in item and not os.path.exists(item["hold"]):
        time.sleep(0.05)  # in the middle of its work, until it may go on
    return hashlib.sha256(str(item["number"]).encode()).hexdigest()
