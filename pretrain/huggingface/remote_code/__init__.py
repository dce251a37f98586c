"""Models that transformers doesn't have, as files that an exported directory carries: `trust_remote_code=True`.

They depend on torch and transformers alone. transformers copies them beside each other, hence the relative imports.
"""
