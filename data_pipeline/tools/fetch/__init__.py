"""Downloads of published files: polite, parallel, resumable by byte range. A file gets its name once it is checked.

`catalogues` lists the published files, `client` sends requests, `download` fetches one file, `many` fetches a list of
them, and `commands` is `data-pipeline fetch`.
"""
