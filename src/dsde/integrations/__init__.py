"""dsde inside other engines: the same policies, and an adapter that only translates. Knows core and policies."""
