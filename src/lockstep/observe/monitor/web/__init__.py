"""The page of `lockstep monitor`: runs in a browser, without anything from other servers."""

from lockstep.observe.monitor.web.server import serve

__all__ = ["serve"]
