"""What a queue's items are worked on with."""

import hashlib
import time


def digest(item):
    time.sleep(item.get("pause", 0))
    return hashlib.sha256(str(item["number"]).encode()).hexdigest()
