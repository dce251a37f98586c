"""Wikipedia's XML dumps: pages, redirects, cuts of dumps in many streams."""
