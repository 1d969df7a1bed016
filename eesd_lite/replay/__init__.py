"""Controllers compared on recorded luck: traces of drafting, injected costs, an oracle (`eesd replay`)."""
