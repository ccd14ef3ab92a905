"""Which commit made what slower: revisions measured in turn, and what was found of them, kept."""
