"""WARC archives and folders of HTML: what is a page, its charset, title and site; what is damaged costs itself alone."""

import gzip

import pytest

from jaxlm.corpus.sources import base

HTML = "text/html; charset=utf-8"
BODY = "<!DOCTYPE html><html><head><title>Page {i}</title></head><body>Grüße {i}</body></html>"


def record(i, body=None, kind=HTML, identified=None, status="200 OK", http="", warc_type="response"):
    body = BODY.format(i=i) if body is None else body
    body = body if isinstance(body, bytes) else body.encode()
    payload = body
    if warc_type == "response":
        head = f"HTTP/1.1 {status}\r\n" + (f"Content-Type: {kind}\r\n" if kind else "") + http
        payload = head.encode() + b"\r\n" + body
    lines = [
        "WARC/1.0", f"WARC-Type: {warc_type}", f"WARC-Target-URI: https://www.site{i}.org/page",
        "WARC-Date: 2024-01-02T03:04:05Z", f"WARC-Record-ID: <urn:uuid:{i}>",
        *(["Content-Type: application/http; msgtype=response"] if warc_type == "response" else []),
        *([f"WARC-Identified-Payload-Type: {identified}"] if identified else []), f"Content-Length: {len(payload)}",
    ]  # fmt: skip
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + payload + b"\r\n\r\n"


def sites(documents):
    return [int(d.metadata["site"].removeprefix("site").removesuffix(".org")) for d in documents]


@pytest.fixture(params=["plain", "members", "one member"])
def write(request, tmp_path):
    """Writes records as one of the ways that crawlers do; gives the path."""

    def write(records):
        if request.param == "plain":
            path, raw = tmp_path / "x.warc", b"".join(records)
        else:
            path = tmp_path / "x.warc.gz"
            raw = (
                b"".join(map(gzip.compress, records))
                if request.param == "members"
                else gzip.compress(b"".join(records))
            )
        path.write_bytes(raw)
        return path

    return write


def test_pages_are_found_by_type_or_by_their_beginning(write, read_source):
    xhtml = '<?xml version="1.0"?>\n<!-- c -->\n<!DOCTYPE html PUBLIC "x"><html xmlns="y"><p>x</html>'
    path = write(
        [
            record(0, warc_type="warcinfo"), record(1),
            record(2, identified="application/xhtml+xml", kind="text/plain"), record(3, xhtml, identified="text/xml"),
            record(4, kind=None), record(5, kind="htm; gaga"), record(6, kind="application/octet-stream"),
            record(7, "%PDF-1.4", kind="application/pdf"),
            record(8, '<?xml version="1.0"?><rss></rss>', kind="text/xml"), record(9, "plain words", kind="text/plain"),
            record(10, status="404 Not Found"), record(11, "Words of a\npage", warc_type="conversion"),
            record(12, "GET / HTTP/1.1\r\n\r\n", warc_type="request"),
        ]
    )  # fmt: skip
    documents, stats = read_source(path)
    assert sites(documents) == [1, 2, 3, 4, 5, 6, 11]
    assert stats.skipped == {"not HTML": 3, "HTTP status is not 200": 1}
    assert documents[0].metadata == {
        "source": "web", "format": "html", "url": "https://www.site1.org/page", "site": "site1.org", "title": "Page 1",
        "date": "2024-01-02T03:04:05Z",
    }  # fmt: skip
    assert documents[0].text == BODY.format(i=1)
    assert documents[-1].text == "Words of a\npage"
    assert documents[-1].metadata["format"] == "text"


def test_many_comments_take_no_time(write, read_source):
    comments = "<!---->" * 500
    documents, stats = read_source(
        write([record(1, comments + "<rss>", kind=None), record(2, comments + " <!-- > -- --><html>x", kind=None)])
    )
    assert sites(documents) == [2]
    assert stats.skipped == {"not HTML": 1}


def test_a_body_that_decodes_beyond_the_limit_is_left_out(write, read_source, monkeypatch):
    monkeypatch.setattr(base, "MAX_RECORD_BYTES", 100_000)
    bodies = ["<html>" + "a" * size for size in (99_994, 99_995, 9_999_995)]
    zipped = [record(i, gzip.compress(b.encode()), http="Content-Encoding: gzip\r\n") for i, b in enumerate(bodies)]
    documents, stats = read_source(write([*zipped, record(3)]))
    assert sites(documents) == [0, 3]
    assert documents[0].text == bodies[0]
    assert stats.skipped == {"record over 16 MiB: split it": 2}


def test_charset_and_encodings_of_http(write, read_source):
    zipped = gzip.compress(BODY.format(i=2).encode())
    path = write(
        [
            record(1, BODY.format(i=1).encode("latin-1"), kind='text/html; charset="ISO-8859-1"'),
            record(2, zipped, http="Content-Encoding: gzip\r\n"),
            record(3, b"5\r\n<html\r\n4\r\n>abc\r\n0\r\n\r\n", http="Transfer-Encoding: chunked\r\n"),
            record(4, http="Content-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n"),  # the archive holds it decoded
            record(5, b"\x1f\x8bnothing", http="Content-Encoding: gzip\r\n"),
        ]
    )
    documents, stats = read_source(path)
    assert [d.text for d in documents] == [BODY.format(i=1), BODY.format(i=2), "<html>abc", BODY.format(i=4)]
    assert sum(stats.skipped.values()) == 1


@pytest.mark.parametrize(
    "spoil",
    [
        lambda r: r.replace(b"Content-Length", b"Content-Lenxth"),
        lambda r: r.replace(b"Content-Length: ", b"Content-Length: 9"),
        lambda r: r.replace(b"Content-Length: ", b"Content-Length: 99999999999"),
        lambda r: r.replace(b"Content-Length: 1", b"Content-Length: "),
        lambda r: r.replace(b"WARC/1.0", b"WXRC/1.0"),
        lambda r: b"WARC/1.0\r\n" + b"\x00\xff" * 500 + b"\r\n\r\n",
    ],
)
def test_a_malformed_record_costs_itself_alone(write, read_source, spoil):
    records = [record(i) for i in range(5)]
    records[2] = spoil(records[2])
    documents, stats = read_source(write(records))
    assert sites(documents) == [0, 1, 3, 4]
    assert list(stats.skipped.values()) == [1]


def test_a_record_that_is_cut_costs_itself_alone(write, read_source):
    records = [record(i, "<html>" + f"{i} words " * 200) for i in range(5)]
    assert sites(read_source(write([*records[:4], records[4][:-700]]))[0]) == [0, 1, 2, 3]
    documents, stats = read_source(write([*records[:2], records[2][:-700] + b"\r\n\r\n", *records[3:]]))
    assert sites(documents) == [0, 1, 3, 4]
    assert list(stats.skipped.values()) == [1]


@pytest.mark.parametrize("fault", ["cut", "flipped"])
@pytest.mark.parametrize("which", [2, 4])
def test_a_damaged_gzip_member_costs_its_record_alone(tmp_path, read_source, fault, which):
    members = [gzip.compress(record(i, "<html>" + "".join(f"{i}{j} " for j in range(3000)))) for i in range(5)]
    spoilt = bytearray(members[which])
    if fault == "cut":
        del spoilt[len(spoilt) // 2 :]
    else:
        spoilt[len(spoilt) // 2] ^= 0xFF
    members[which] = bytes(spoilt)
    (tmp_path / "x.warc.gz").write_bytes(b"".join(members))
    documents, stats = read_source(tmp_path)
    assert sites(documents) == [i for i in range(5) if i != which]
    assert sum(stats.skipped.values()) == 1


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
    told = [base.WRONG_CHARSET] if "misdeclared" in body else []
    if body == JAPANESE and charset not in meta.lower():
        told = [base.READ_AS.format({"gbk": "gb18030", "iso-2022-jp": "iso2022_jp"}.get(charset, charset))]
    assert stats.repaired == dict.fromkeys(told, 1)


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
