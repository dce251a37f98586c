"""WARC archives of whole pages, and the records that WET files share with them."""
