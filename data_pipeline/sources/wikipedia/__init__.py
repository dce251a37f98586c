"""Wikipedia's XML dumps: pages, redirects, and ranges of dumps with many streams."""
