"""Models that transformers lacks, as files that an exported directory includes: `trust_remote_code=True`.

They depend only on torch and transformers. transformers copies them into one folder, hence the relative imports.
"""
