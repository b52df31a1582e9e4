"""The cluster in a browser: ``koinon console`` serves one page, which shows and changes nothing."""
