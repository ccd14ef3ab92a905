"""Ranks that start with torch imported already: they are forked from a process that has done so.

A *server* has imported torch and Lockstep, and no code of the user's. In place of an interpreter, a
launcher starts a *proxy* (`proxy.py`). It lets the server fork a process, passes its arguments,
environment, open files and limits to that, forwards signals, and ends as that process does. Where
the result would differ from a start of its own, the proxy becomes the interpreter.
"""
