"""A hook of mkdocs: links from a page to files outside docs/, such as the source.

They work where the repository is read. The site does not hold those files, so there the text of the
link stands alone; that the file exists is checked.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

_LOG = logging.getLogger("mkdocs.hooks.links")
_LINK = re.compile(r"\[([^\]\n]+)\]\(((?:\.\./)+[^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """The page with links out of docs/ replaced by their texts."""
    docs = Path(config["docs_dir"])
    folder = posixpath.dirname(page.file.src_uri)

    def without_link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[2]))
        if not target.startswith("../"):
            return match[0]
        if not (docs / target).exists():
            _LOG.warning("%s: links to %s, which does not exist", page.file.src_uri, match[2])
        return match[1]

    return _LINK.sub(without_link, markdown)
