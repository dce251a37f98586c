"""Download published files: politely, in parallel, resumable by byte range, each checked before it has its name.

`catalogues` says which files are published, `client` asks servers, `download` brings one file, `many` all of them,
`commands` is `data-pipeline fetch`.
"""
