"""HTML folders: charsets as pages declare them or fail to, titles, canonical URLs, sites."""

import gzip

import pytest

JAPANESE = "日本語のテキストです。これは文字コードの判定に使う長めの文章です。"
PAGE = "<html><head>{meta}<title> A &amp;\n B </title></head><body><p>{body}</p></body></html>"


@pytest.mark.parametrize(
    ("meta", "body", "charset"),
    [
        ("", "é, plain UTF-8", "utf-8"),
        ('<meta charset="iso-8859-1">', "é in UTF-8, misdeclared", "utf-8"),
        ('<meta charset="iso-8859-1">', "Grüße: schön", "latin-1"),
        ("<meta http-equiv=Content-Type content='text/html; charset=Shift_JIS'>", JAPANESE, "shift_jis"),
        ('<meta charset="iso-2022-jp">', JAPANESE, "iso-2022-jp"),
        ('<meta charset="utf-8">', JAPANESE, "gbk"),
        ("", JAPANESE, "shift_jis"),
        ("", JAPANESE, "iso-2022-jp"),
        ("", "Byte order mark é", "utf-8-sig"),
        ("", "Byte order mark é", "utf-16"),
    ],
)
def test_charsets(tmp_path, read_source, meta, body, charset):
    (tmp_path / "x.html").write_bytes(PAGE.format(meta=meta, body=body).encode(charset, "ignore"))
    (document,), stats = read_source(tmp_path)
    assert document.text == PAGE.format(meta=meta, body=body.encode(charset, "ignore").decode(charset))
    assert document.metadata["title"] == "A & B"
    assert document.metadata["format"] == "html"
    assert not stats.repaired


def test_a_bad_byte_in_a_page_costs_that_byte(tmp_path, read_source):
    raw = PAGE.format(meta='<meta charset="utf-8">', body=JAPANESE).encode()
    (tmp_path / "x.html").write_bytes(raw.replace("本".encode(), b"\xff"))
    (document,), stats = read_source(tmp_path)
    assert JAPANESE.replace("本", "\ufffd") in document.text
    assert sum(stats.repaired.values()) == 1


def test_sites_urls_and_broken_files(tmp_path, read_source):
    (tmp_path / "docs.a.org").mkdir()
    canonical = "<link href='https://www.b.org/x?a&amp;b' rel=\"canonical\">"
    (tmp_path / "docs.a.org" / "one.htm").write_text("<p>one")
    (tmp_path / "docs.a.org" / "two.xhtml").write_text(f"<html><head>{canonical}</head>")
    (tmp_path / "docs.a.org" / "zip.html.gz").write_bytes(gzip.compress(b"<p>zipped"))
    (tmp_path / "docs.a.org" / "zap.html.gz").write_bytes(gzip.compress(b"<p>zipped" * 99)[:-20])
    (tmp_path / "empty.html").write_text(" ")
    (tmp_path / "top.html").write_text("<p>top")
    (tmp_path / "style.css").write_text("p {}")
    documents, stats = read_source(tmp_path)
    found = {d.id: (d.metadata["site"], d.metadata.get("url")) for d in documents}
    assert found == {
        "docs.a.org/one.htm": ("docs.a.org", None),
        "docs.a.org/two.xhtml": ("b.org", "https://www.b.org/x?a&b"),
        "docs.a.org/zip.html.gz": ("docs.a.org", None),
        "top.html": ("web", None),
    }
    assert stats.skipped == {"unreadable: gzip member cut short": 1, "empty": 1}


def test_a_forced_format_takes_a_glob_at_its_word(tmp_path, read_source):
    (tmp_path / "wiki").mkdir()
    (tmp_path / "wiki" / "Page").write_text("<p>one")
    assert [d.id for d in read_source(tmp_path / "wiki" / "*", format="html")[0]] == ["Page"]
