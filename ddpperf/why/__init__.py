"""Why a measurement got slower: rows of a traced step that add up to the change."""
