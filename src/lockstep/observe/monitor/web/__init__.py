"""The page of `lockstep monitor`: runs in a browser, with nothing from elsewhere."""

from lockstep.observe.monitor.web.server import serve

__all__ = ["serve"]
