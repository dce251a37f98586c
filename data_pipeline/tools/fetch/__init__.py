"""Downloads of published files: `catalogues` lists them, `download` fetches them."""
