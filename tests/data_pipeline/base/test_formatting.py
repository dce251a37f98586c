"""Passwords are hidden in what is shown, and numbers have their units."""

from data_pipeline.base.formatting import counted, masked, masked_code, masked_values, without_login
from tests.support.tables import each

URLS = {
    "https://me:hunter2@example.org/x": "https://me:***@example.org/x",
    "mysql+pymysql://me:h@nt/er:2@db:3306/mlflow": "mysql+pymysql://me:***@db:3306/mlflow",
    "https://:hunter2@example.org": "https://:***@example.org",
    '{"a": "ftp://u:p1@a/b", "c": "ftp://u:p2@d"}': '{"a": "ftp://u:***@a/b", "c": "ftp://u:***@d"}',
    "https://example.org/x?user=me&password=hunter2&y=1": "https://example.org/x?user=me&password=***&y=1",
    "https://cdn.example.org/x?X-Amz-Signature=abc&y=1": "https://cdn.example.org/x?X-Amz-Signature=***&y=1",
    "https://cdn.example.org/x?Expires=1&Signature=abc~&y": "https://cdn.example.org/x?Expires=1&Signature=***&y",
}
OTHER_URLS = [
    *("https://me@example.org:8080/a", "http://127.0.0.1:5000/", "sqlite:////home/me/runs/mlflow.db"),
    *("s3://bucket/corpora", "a: b@c"),
]
CODE = {
    '+api_key = "abc123def"': '+api_key = "***"',
    "-HF_TOKEN=abc123def # old": "-HF_TOKEN=*** # old",
    '+  "password": "hunter2!",': '+  "password": "***",',
    "+login(hf_abcdefghijklmnopqrst)": "+login(***)",
    "+key: AKIAIOSFODNN7EXAMPLE": "+key: ***",
    "+uri: https://me:hunter2@host": "+uri: https://me:***@host",
    "-----BEGIN RSA PRIVATE KEY-----\n+MIIEow\n-----END": "-----BEGIN RSA PRIVATE KEY-----***-----END",
}
OTHER_CODE = ["+tokens = 512 * 2048000", "+max_new_tokens: 128", "+    tokenizer = load(directory)"]


@each(
    "hide, text, shown",
    [
        *((masked, *pair) for pair in URLS.items()),
        *((masked, url, url) for url in OTHER_URLS),
        *((masked_code, *pair) for pair in CODE.items()),
        *((masked_code, code, code) for code in OTHER_CODE),
    ],
)
def test_secrets_are_hidden_and_nothing_else_is(hide, text, shown):
    assert (hide(text), hide(shown)) == (shown, shown)


def test_settings_are_hidden_at_any_depth_and_keep_their_types():
    settings = {"a": [{"uri": "https://me:hunter2@host"}, 3, None, 0.5], "b": True}
    assert masked_values(settings) == {"a": [{"uri": "https://me:***@host"}, 3, None, 0.5], "b": True}
    # a link needs no login
    assert without_login("https://me:***@host:80/a@b") == "https://host:80/a@b"
    assert without_login("https://host/a@b") == "https://host/a@b"


def test_one_is_singular():
    assert [counted(number, "unit") for number in (0, 1, 2, 2000)] == ["0 units", "1 unit", "2 units", "2,000 units"]
