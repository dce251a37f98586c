"""The addresses of the publishers."""

COMMON_CRAWL = "https://data.commoncrawl.org/"
HUGGING_FACE = "https://huggingface.co/"
WIKIMEDIA = "https://dumps.wikimedia.org/"

C4_CONFIGS = ("en", "en.noblocklist", "en.noclean", "realnewslike")
