"""The client of a studio: the surface of `sublet.gpu`, over HTTP.

Rules of this folder:
- Plain Python and `http.client`: it runs wherever Python runs, with no GPU, no ledger and nothing of Linux.
- The client decides nothing: the studio's answers are shown as they come, its errors raised as the classes
  they are everywhere else.
- What a session returns is unpickled here, as from a worker of one's own: use a studio you trust with this
  machine.
"""
