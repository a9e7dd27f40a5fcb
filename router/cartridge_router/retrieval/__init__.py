"""Documents for a question: a pure library. Owns no settings, no catalog and no event loop."""
