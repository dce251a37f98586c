"""Wikipedia's XML dumps: pages, and ranges of dumps with many streams."""
