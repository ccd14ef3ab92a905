"""Ranks that begin with torch imported: forked from a process that has done so before.

A *server* has imported torch and Lockstep, and no code of the user's. What a launcher starts in the
place of an interpreter is a *proxy* (`proxy.py`), which has the server fork a process, hands
its arguments, environment, open files and limits over to it, passes signals on, and ends as it
does. Where this would not be as a start of its own is, the proxy becomes the interpreter.
"""
