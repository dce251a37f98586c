"""Commands that are used beside a build. A build runs without them."""
